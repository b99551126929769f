"""The engine client against a real `vllm serve` on CPU, alone and under a whole rollout.

Slow: run by `make test-vllm`, which installs vLLM (3.2 GB) and a tiny random model below
.perdure/vllm, once. The model says noise; ids, logprobs, versions and refusals are a real server's.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.parity.parity_conversations import Job
from benchmarks.parity.parity_measurement import Stand, measure
from perdure.dialects.base import Refused
from perdure.engines.base import Engine, TokenEngine
from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.clients.token_endpoint import (
    TOKENS_AN_EVENT,
    BreakKind,
    EngineRequest,
    StreamBroken,
)
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.clients.vllm_control import PROBE_SESSION, EngineControl
from perdure.engines.configured_engine import ConfiguredEngine
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState, name_of
from perdure.engines.health_check import HealthCheck, Load
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.token_salvage import Salvage
from perdure.episodes import turns_parquet
from perdure.episodes.episode_store import read_run
from perdure.errors import CallsRefused
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.instances import instance_catalog
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.local_server import served
from perdure.types import (
    FinishReason,
    Grading,
    Instance,
    Sampling,
    Source,
    SourceKind,
    Turn,
    VersionSpan,
)

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".perdure/vllm"
START_S = 600.0
CONTEXT = 8192
END_OF_TURN = 151_645
GENERATE = "/inference/v1/generate"
FOREIGN = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
SERVER = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
PROMPT = load_tokenizer("qwen3").encode_plain("The repository is small, and the fault is smaller.")
SAMPLING = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [END_OF_TURN]}
EVERY_WISH = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "seed": 7,
    "stop": ["never said"],
}
"""What an agent's request may ask of the sampler."""
PREFILL_TOLERANCE = 0.2
"""Reading a token and sampling it are different kernels in bf16."""
PARITY_TOLERANCE = 0.02
"""Two to five steps of bf16 at this model's logits; another token's logprob is 0.2 away."""


@pytest.fixture(scope="session")
def installed() -> Path:
    done = subprocess.run(
        [ROOT / "infra/setup/vllm", VLLM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        pytest.skip(f"vLLM for CPU cannot be installed here: {said}")
    return VLLM


@pytest.fixture(scope="session")
def url(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests: it takes a minute and 3.3 GB."""
    with _serving(installed, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


@contextmanager
def _serving(installed: Path, log: Path, *more: str) -> Iterator[str]:
    """A server with these further flags; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bin_folder = installed / "venv/bin"
    flags = ["--enforce-eager", "--enable-scale-out", "--generation-config", "vllm"]
    flags += ["--logprobs-mode", "processed_logprobs", "--max-model-len", str(CONTEXT)]
    flags += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), *more]
    with log.open("wb") as file:
        server = subprocess.Popen(
            ["nice", bin_folder / "vllm", "serve", installed / "model", *flags],
            env={**os.environ, **SERVER, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end_group(server)


def _wait_until_healthy(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start: {log.read_text()[-3000:]}")


def _end_group(server: "subprocess.Popen[bytes]") -> None:
    """Its engine processes too: they outlive a killed server."""
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


@pytest.fixture
async def engine(url: str, client: httpx.AsyncClient) -> AsyncIterator[TokenEngine]:
    """The gateway finds out the kind of server by asking it."""
    engine = ConfiguredEngine(Settings(engine={"url": url, "model": "policy"}), client)
    found = await engine.current()
    assert isinstance(found, Engine)
    yield found.tokens
    await engine.pool.aclose()


async def _rescored(client: httpx.AsyncClient, url: str, ids: list[int], start: int) -> list[float]:
    """The logprob of each id from `start` on, as vLLM reads them in one prompt."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    body = {"model": "policy", "token_ids": ids, "request_id": "score", "sampling_params": sampling}
    found = (await client.post(f"{url}{GENERATE}", json=body)).json()["prompt_logprobs"]
    return [found[i][str(ids[i])]["logprob"] for i in range(start, len(ids))]


async def test_logprobs_are_those_of_the_sampled_tokens(
    engine: TokenEngine, client: httpx.AsyncClient, url: str
) -> None:
    """Reading the completion back gives each token the logprob that was recorded for it."""
    sampled = await engine.generate(GenerateCall(PROMPT, SAMPLING, "s", "read-back"))

    again = await _rescored(client, url, [*PROMPT, *sampled.token_ids], len(PROMPT))

    assert len(sampled.token_ids) == len(again) == 12
    assert list(sampled.logprobs) == pytest.approx(again, abs=PREFILL_TOLERANCE)


async def test_a_stopped_turn_ends_with_its_stop_token(engine: TokenEngine) -> None:
    """The token that ended the turn is part of it, as in the scripted engine."""
    certain = {**SAMPLING, "logit_bias": {str(END_OF_TURN): 100}}

    ended = await engine.generate(GenerateCall(PROMPT, certain, "s", "stop"))

    assert (list(ended.token_ids), ended.finish_reason) == ([END_OF_TURN], FinishReason.STOP)


class Events(Salvage):
    """Notes how many tokens came together."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version: int | None,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().add(ids, logprobs, version, kept)
        self.sizes += [len(ids)] if ids else []


@pytest.mark.parametrize("wish", [{}, {"stop": ["never said"]}], ids=["plain", "stop text"])
async def test_the_first_token_comes_at_once_and_then_several_an_event(
    url: str, wish: dict[str, Any]
) -> None:
    """Each with its logprob, and the rest with the finish reason."""
    salvage = Events()
    sampling = {**SAMPLING, "max_tokens": 2 + 3 * TOKENS_AN_EVENT, "ignore_eos": True, **wish}

    async with aclosing(Connections()) as connections:
        server = VllmEngine("vllm e", url, connections)
        ask = EngineRequest("policy", PROMPT, sampling, "s", "events")
        reason = await server.sample(ask, salvage, lambda: None)

    assert salvage.sizes == [1, *[TOKENS_AN_EVENT] * 3, 1]
    assert len(salvage.logprobs) == len(salvage.ids) == 2 + 3 * TOKENS_AN_EVENT
    assert reason is FinishReason.LENGTH


async def test_an_abort_brings_the_tokens_that_were_held_back(
    url: str, client: httpx.AsyncClient
) -> None:
    """A weight update may stop a completion: what vLLM has sampled of it is kept, to the last token that
    vLLM itself counts."""
    salvage = Events()
    sampling = {**SAMPLING, "max_tokens": 4000, "ignore_eos": True}
    ask = EngineRequest("policy", PROMPT, sampling, "s", "abort")
    await client.post(f"{url}/update_weight_version", json={"new_version": "step-41"})
    async with aclosing(Connections()) as connections:
        server = VllmEngine("vllm e", url, connections)
        answering = asyncio.create_task(server.sample(ask, salvage, lambda: None))
        async with asyncio.timeout(START_S):
            while len(salvage.sizes) < 3:
                await asyncio.sleep(0.01)
            await client.post(f"{url}/pause", params={"mode": "abort", "clear_cache": "true"})
            with pytest.raises(StreamBroken) as broken:
                await answering
            await client.post(f"{url}/resume")

    assert broken.value.kind is BreakKind.ABORTED
    assert salvage.versions == [VersionSpan(version=41, start=0, end=len(salvage.ids))]
    again = await _rescored(client, url, [*PROMPT, *salvage.ids], len(PROMPT))
    assert list(salvage.logprobs) == pytest.approx(again, abs=PREFILL_TOLERANCE)


async def test_every_wish_of_an_agent_is_understood(engine: TokenEngine) -> None:
    """vLLM accepts every sampling parameter that a request may set, and the answer is complete."""
    made = await engine.generate(GenerateCall(PROMPT, {**SAMPLING, **EVERY_WISH}, "s", "wishes"))

    assert len(made.logprobs) == len(made.token_ids) == 12


async def test_a_prompt_beyond_the_context_is_told_as_such(engine: TokenEngine) -> None:
    """The refusal carries the code by which agents know that their context is exhausted."""
    with pytest.raises(Refused) as refused:
        await engine.generate(GenerateCall([*PROMPT] * 1000, SAMPLING, "s", "long"))

    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


async def test_a_wrong_model_name_is_told_with_the_fix(url: str, client: httpx.AsyncClient) -> None:
    """vLLM's 404 names the settings that must agree with it."""
    pool = EnginePool(InMemoryRoster(), client, [EngineSpec(url)], PoolOptions(model="another"))

    with pytest.raises(CallsRefused, match="PERDURE_ENGINE__MODEL"):
        await pool.generate(GenerateCall(PROMPT, SAMPLING, "s", "name"))
    await pool.aclose()


async def test_only_an_engine_with_processed_logprobs_joins(
    url: str, installed: Path, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """vLLM's default, raw logprobs, is found by one token, and the reason names the flag."""
    with _serving(installed, tmp_path / "log", "--logprobs-mode", "raw_logprobs") as raw:
        refused = HealthCheck(EngineControl(raw, client), hang_s=START_S)
        found = await refused.look(_starting(raw), Load())
    other = await HealthCheck(EngineControl(url, client), hang_s=START_S).look(
        _starting(url), Load()
    )

    assert found is None or found.state is EngineState.STARTING
    assert "--logprobs-mode processed_logprobs" in refused.refused
    assert other is not None
    assert other.state is EngineState.READY


def _starting(url: str) -> EngineRecord:
    return EngineRecord(
        name=name_of(url), url=url, model="policy", generation=1, state=EngineState.STARTING
    )


async def test_a_stop_text_ends_an_answer(url: str, tmp_path: Path) -> None:
    """The agent reads what is before it; the record holds all that was sampled."""
    async with LocalGateway(tmp_path, engine={"url": url, "kind": "vllm"}) as gateway:
        whole, _, _ = await _said(gateway, "whole")
        middle = len(whole) // 2
        stop = whole[middle : middle + 4]
        text, reason, turn = await _said(gateway, "cut", stop=[stop])

    assert (text.rstrip(), reason) == (whole[: whole.index(stop)].rstrip(), "stop")
    assert stop in load_tokenizer("qwen3").decode(list(turn.completion_ids))
    assert turn.finish_reason is FinishReason.STOP


async def _said(gateway: LocalGateway, session: str, **asked: Any) -> tuple[str, str, Turn]:
    """A greedy answer of 24 tokens at most: its text, why it ended, and its record."""
    key = await gateway.open(session, sampling=Sampling(decided_by="agent"))
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=START_S) as http:
        answer = await http.post(
            "/v1/chat/completions",
            json={**body, "temperature": 0.0, **asked},
            headers={"authorization": f"Bearer {key}"},
        )
    choice = answer.json()["choices"][0]
    await gateway.control.close(session)
    (turn,) = turns_parquet.decode((await gateway.store.get(turns_key_of(session))).data)
    return choice["message"]["content"], choice["finish_reason"], turn


@dataclass
class Recorder:
    """A proxy between gateway and vLLM that records requests and answers by request id."""

    upstream: str
    client: httpx.AsyncClient
    seen: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    url: str = ""

    async def pass_on(self, request: Request) -> Response:
        body = await request.body()
        headers = {"content-type": "application/json"}
        answer = await self.client.post(
            f"{self.upstream}{request.url.path}", content=body, headers=headers
        )
        if answer.is_success:
            asked = await request.json()
            if not asked["request_id"].startswith(PROBE_SESSION):
                self.seen[asked["request_id"]] = (asked, _joined(answer.text))
        kind = answer.headers["content-type"]
        return Response(answer.content, answer.status_code, media_type=kind)


def _joined(stream: str) -> dict[str, Any]:
    """The chunks of a stream as the one answer that they are parts of."""
    ids: list[int] = []
    content: list[dict[str, Any]] = []
    for event in stream.split("\n\n"):
        data = event.removeprefix("data:").strip()
        for choice in json.loads(data)["choices"] if data.startswith("{") else ():
            ids += choice["token_ids"]
            content += (choice["logprobs"] or {"content": []})["content"]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": content}}]}


@asynccontextmanager
async def recorder(upstream: str, client: httpx.AsyncClient) -> AsyncIterator[Recorder]:
    recorder = Recorder(upstream, client)
    app = Starlette(routes=[Route(GENERATE, recorder.pass_on, methods=["POST"])])
    async with served(app) as recorder.url:
        yield recorder


async def perdure(home: Path, *arguments: str, **env: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.cli.main", *arguments),
        env={**kept, "PERDURE_HOME": str(home), **env},
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()[-3000:]


async def _toy(home: Path) -> None:
    tree = home / "tree"
    tree.mkdir(parents=True)
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    instance = Instance(
        instance_id="add",
        dataset="toys",
        problem_statement="add(2, 3) must be 5.",
        source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
        grading=Grading(protocol="eval_cmd", eval_cmd="python3 -c 'import calc'"),
    )
    await instance_catalog.save(LocalStore(home / "store"), instance)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    if missing := BubblewrapProvider(Settings(home=tmp_path)).check():
        pytest.skip("; ".join(missing))
    home = tmp_path / "h"
    shared_tools = ROOT / ".perdure/tools"  # the agent is installed once for all tests
    shared_tools.mkdir(parents=True, exist_ok=True)
    home.mkdir()
    (home / "tools").symlink_to(shared_tools)
    yield home
    shutil.rmtree(home, ignore_errors=True)


async def test_a_rollout_records_exactly_what_vllm_sampled(
    url: str, client: httpx.AsyncClient, home: Path
) -> None:
    """mini-swe-agent plays three turns; the store holds vLLM's ids, logprobs and weight version. It goes on
    without an answer that calls no tool, so only the last one is trained."""
    await _toy(home)
    await client.post(f"{url}/update_weight_version", json={"new_version": "step-41"})
    settings = ("sampling.max_tokens_per_turn=32", "agent_options.step_limit=3")
    chosen = [word for setting in settings for word in ("--set", setting)]

    async with recorder(url, client) as between:
        env = {"PERDURE_ENGINE__URL": between.url, "PERDURE_ENGINE__KIND": "vllm"}
        try:
            await perdure(home, "run", "toys/add", "--run-id", "noise", *chosen, "--wait", **env)
        finally:
            await perdure(home, "down")

    store = LocalStore(home / "store")
    (episode,) = await read_run(store, "noise")
    assert episode.turns_key is not None
    recorded = turns_parquet.decode((await store.get(episode.turns_key)).data)
    assert len(recorded) == len(between.seen) == 3
    assert [_facts(turn) for turn in recorded] == [_told(*pair) for pair in between.seen.values()]
    assert (episode.trainable, episode.trained_tokens) == (True, 32)
    assert episode.trajectory.untrained_tokens == {"unused": 2 * 32}
    assert (episode.policy_version_min, episode.policy_version_max) == (41, 41)


def _facts(turn: Turn) -> tuple[list[int], list[int], list[float]]:
    return list(turn.prompt_ids), list(turn.completion_ids), list(turn.logprobs)


def _told(
    asked: dict[str, Any], answer: dict[str, Any]
) -> tuple[list[int], list[int], list[float]]:
    choice = answer["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return asked["token_ids"], choice["token_ids"], logprobs


async def test_transformers_agrees_with_what_was_recorded(
    url: str, installed: Path, tmp_path: Path
) -> None:
    """vLLM scores the ids that a gateway recorded: each gets the recorded logprob, within bf16. If
    it prefers another id than a greedy one, the two logprobs are almost equal."""
    stand = Stand(
        model=installed / "model",
        tokenizer="qwen3",
        dtype="bfloat16",
        device="cpu",
        vllm=installed / "venv/bin/vllm",
        python=installed / "venv/bin/python",
        engine_url=url,
    )

    report = await measure(stand, Job(conversations=3, turns=2, tokens=16, text=400), tmp_path)

    assert {(one.mode, one.scored_in) for one in report.figures} == {
        (mode, dtype) for mode in ("greedy", "sampled") for dtype in ("bfloat16", "float32")
    }
    for found in report.figures:
        assert found.turns == 3 * 2
        assert found.max < PARITY_TOLERANCE
        assert all(one.behind < PARITY_TOLERANCE for one in found.differences or ())
