"""The pool of engines against real engine processes that are killed, stopped and replaced."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_roster import InMemoryRoster, add_engine, drain_engine, remove_engine
from perdure.engines.engine_state import EngineSpec, EngineState, name_of
from perdure.engines.pool.completion_call import GenerateCall
from perdure.episodes.turns_parquet import decode
from perdure.errors import GatewayUnavailable
from perdure.gateway.base import control_token
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import ScriptedEngine, logprob
from tests.integration.engine_calls import (
    LONG,
    PROMPT,
    SAMPLING,
    Fixed,
    ask,
    opened,
    ready,
    sampling,
    undisturbed,
    until,
)

HANG_S = 2.0
"""Short, for tests that wait until a stopped engine is noticed; elsewhere long, so that no live engine counts as hung."""


class EngineProcess:
    """`python -m perdure.testing.scripted_engine`, in a process of its own; slow until `hurry`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        scripts = folder / "scripts.json"
        scripts.write_text(json.dumps(LONG))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "perdure.testing.scripted_engine"),
                *("--port", "0", "--scripts", str(scripts), "--chunk-delay", "0.4", *arguments),
            ],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        self.name = name_of(self.url)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def hurry(self, client: httpx.AsyncClient) -> None:
        """Send the rest of the completion at once: the test's fault has happened."""
        answer = await client.post(f"{self.url}/control", json={"chunk_delay_s": 0.0})
        answer.raise_for_status()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    started: list[EngineProcess] = []

    def start(*arguments: str) -> EngineProcess:
        started.append(EngineProcess(tmp_path, *arguments))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


@pytest.mark.parametrize(
    ("number", "hang_s"),
    [(signal.SIGKILL, 60.0), pytest.param(signal.SIGSTOP, HANG_S, marks=pytest.mark.longer)],
    ids=["killed", "hung"],
)
async def test_a_completion_survives_its_engine(
    processes: Callable[..., EngineProcess],
    client: httpx.AsyncClient,
    number: int,
    hang_s: float,
) -> None:
    """Killed or hung mid-stream: same ids and logprobs as undisturbed, one answer, two spans."""
    engines = {engine.name: engine for engine in (processes(), processes())}
    urls = [engine.url for engine in engines.values()]
    async with opened(client, *urls, hang_s=hang_s) as pool:
        await ready(pool, 2)
        call = ask(pool)
        first = await sampling(pool)
        engines.pop(first.record.name).signal(number)
        (other,) = engines.values()
        await other.hurry(client)
        completion = await call

    whole = await undisturbed()
    assert list(completion.token_ids) == whole
    assert list(completion.logprobs) == [logprob(t, i) for i, t in enumerate(whole)]
    before, after = completion.engines
    assert (before.start, before.end, after.end) == (0, after.start, len(whole))
    assert before.end >= 40
    assert before.engine.endswith(first.record.name)
    assert completion.engine == after.engine != before.engine
    assert [(v.version, v.start, v.end) for v in completion.versions] == [(1, 0, len(whole))]


@pytest.mark.longer
async def test_an_engine_that_comes_back_is_a_new_generation(
    processes: Callable[..., EngineProcess], client: httpx.AsyncClient
) -> None:
    """A stopped engine is declared dead; once it continues, it takes calls as a new generation."""
    engine = processes()
    async with opened(client, engine.url, hang_s=HANG_S) as pool:
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        first = pooled.record.generation
        call = ask(pool)
        await sampling(pool)
        engine.signal(signal.SIGSTOP)
        await until(lambda: pooled.record.state is EngineState.DEAD)
        engine.signal(signal.SIGCONT)
        await engine.hurry(client)
        completion = await call

    assert list(completion.token_ids) == await undisturbed()
    assert [span.generation for span in completion.engines] == [first, first + 1]


@pytest.mark.longer
async def test_another_start_at_the_same_address_is_a_new_generation(
    processes: Callable[..., EngineProcess], client: httpx.AsyncClient
) -> None:
    """A restarted engine is a new generation, although it answers at once."""
    engine = processes()
    port = engine.name.rpartition(":")[2]
    async with opened(client, engine.url) as pool:
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        first = pooled.record.generation
        engine.close()
        await processes("--port", port).hurry(client)
        await until(lambda: pooled.record.serves and pooled.record.generation == first + 1)
        completion = await ask(pool)

    assert [span.generation for span in completion.engines] == [first + 1]


async def test_a_fenced_engine_refuses_requests_for_another_start(
    processes: Callable[..., EngineProcess], client: httpx.AsyncClient
) -> None:
    """Requests carry the fenced model name, so that the engine's next start answers 404, not tokens."""
    engine = processes("--generation", "7")
    async with opened(client, engine.url) as pool:
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        name = pooled.record.wire_model
        answer = await client.post(
            f"{engine.url}/inference/v1/generate", json={"model": "policy-g6", "token_ids": [1]}
        )

    assert name == "policy-g7"
    assert answer.status_code == 404


async def test_an_engine_that_only_says_it_is_healthy_is_not_ready(
    client: httpx.AsyncClient,
) -> None:
    """Its /health answers 200 while generation hangs, so no call is sent to it."""
    async with ScriptedEngine(LONG) as hung, ScriptedEngine(LONG) as good:
        hung.control(kind="hang")
        async with opened(client, hung.url, good.url) as pool:
            completions = await asyncio.gather(*(ask(pool, f"s-{n}") for n in range(4)))
            state = pool.engines[name_of(hung.url)].record.state

    assert {span.engine for c in completions for span in c.engines} == {f"vllm {name_of(good.url)}"}
    assert state is EngineState.STARTING


async def test_all_gateways_of_a_home_follow_one_roster(client: httpx.AsyncClient) -> None:
    """An engine added through one process is used, and drained, by the other."""
    roster = InMemoryRoster()
    async with (
        ScriptedEngine(LONG) as one,
        ScriptedEngine(LONG) as two,
        opened(client, one.url, roster=roster) as here,
        opened(client, one.url, roster=roster) as there,
    ):
        await add_engine(here.fleet, EngineSpec(two.url), "policy")
        await ready(there, 2)
        await drain_engine(there.fleet, name_of(one.url))
        await until(lambda: here.engines[name_of(one.url)].record.removed)
        completion = await ask(here)

    assert completion.engine == f"vllm {name_of(two.url)}"


async def test_a_drained_engine_finishes_its_calls(client: httpx.AsyncClient) -> None:
    """Until its deadline its calls stay, and no new one is sent to it."""
    async with (
        ScriptedEngine(LONG, chunk_delay_s=0.02) as one,
        ScriptedEngine(LONG, chunk_delay_s=0.02) as two,
        opened(client, one.url, two.url) as pool,
    ):
        await ready(pool, 2)
        call = ask(pool)
        pooled = await sampling(pool)
        await drain_engine(pool.fleet, pooled.record.name)
        other = await ask(pool, "t")
        completion = await call

    assert len(completion.engines) == 1
    assert completion.engine == pooled.client.name != other.engine


async def test_a_drain_moves_the_remaining_calls_at_its_deadline(client: httpx.AsyncClient) -> None:
    """At a spot notice's deadline the completion continues at another engine with its sampled
    tokens."""
    async with (
        ScriptedEngine(LONG, chunk_delay_s=0.05) as one,
        ScriptedEngine(LONG, chunk_delay_s=0.05) as two,
        opened(client, one.url, two.url) as pool,
    ):
        await ready(pool, 2)
        call = ask(pool)
        pooled = await sampling(pool)
        await drain_engine(pool.fleet, pooled.record.name, deadline_s=0)
        completion = await call

    assert list(completion.token_ids) == await undisturbed()
    assert len(completion.engines) == 2


async def test_a_call_waits_for_room_and_is_never_refused(client: httpx.AsyncClient) -> None:
    """While engines are full, an agent sees a slow answer."""
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        pooled.capacity = Fixed(agents=1)
        first = await ask(pool, "a")
        second = ask(pool, "b")
        await until(lambda: pool.waiting)
        pool.left("a")
        answered = await second

    assert first.finish_reason == answered.finish_reason == "stop"


async def test_a_call_that_waits_for_room_fails_once_the_engines_are_gone(
    client: httpx.AsyncClient,
) -> None:
    """A call waits without a limit for a full engine, and a bounded time for a dead one."""
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url, patience_s=0.2) as pool:
        await ready(pool, 1)
        (pooled,) = pool.engines.values()
        pooled.capacity = Fixed(agents=1)
        await ask(pool, "a")
        waits = ask(pool, "b")
        await until(lambda: pool.waiting)
        await remove_engine(pool.fleet, pooled.record.name)

        with pytest.raises(GatewayUnavailable):
            await waits


async def test_a_completion_with_a_penalty_restarts_on_the_next_engine(
    client: httpx.AsyncClient,
) -> None:
    """A penalty would treat salvaged tokens as prompt, so the whole completion comes from one engine."""
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        engine.control(kind="eof_mid_stream", times=1)
        completion = await pool.generate(
            GenerateCall(PROMPT, {**SAMPLING, "presence_penalty": 1.0}, "s", "s-0")
        )

    assert list(completion.token_ids) == await undisturbed()
    assert len(completion.engines) == 1


async def test_a_turn_that_ended_is_not_continued(client: httpx.AsyncClient) -> None:
    """The stop token came without the finish reason; continuing would sample past the end."""
    async with ScriptedEngine(LONG) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        engine.control(kind="done_without_finish", times=1)
        completion = await ask(pool)

    assert completion.finish_reason == "stop"
    assert engine.stats().calls == 1


async def test_a_resumed_turn_is_recorded_with_its_engines(tmp_path: Path) -> None:
    """The stored turn says which engine sampled which tokens."""
    async with (
        ScriptedEngine(LONG) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        key = await gateway.open("s")
        engine.control(kind="eof_mid_stream", times=1)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            body = {"model": "policy", "messages": [{"role": "user", "content": "Go."}]}
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        await gateway.control.close("s")
        (turn,) = decode((await gateway.store.get(turns_key_of("s"))).data)

    assert answer.status_code == 200
    assert [span.generation for span in turn.engines] == [1, 1]
    assert turn.engines[-1].end == len(turn.completion_ids)
    assert turn.engines[0].end == turn.engines[1].start


# --- control ---------------------------------------------------------------------------------


async def test_engines_are_added_and_removed_with_the_control_token(tmp_path: Path) -> None:
    """A session key is not enough; an unknown name gives 404; a wrong weight is named."""
    async with ScriptedEngine(LONG) as engine, LocalGateway(tmp_path) as gateway:
        control = {"authorization": f"Bearer {control_token(gateway.secret)}"}
        session = {"authorization": f"Bearer {await gateway.open('s')}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=control) as http:
            asked = {"model": "judge", "tokenizer": "qwen3", "run": "eval-*"}
            added = await http.post("/engines", json={"url": engine.url, "weight": 2, **asked})
            listed = (await http.get("/engines")).json()["engines"]
            refused = await http.get("/engines", headers=session)
            wrong = await http.post("/engines", json={"url": engine.url, "weight": -1})
            removed = await http.delete(f"/engines/{name_of(engine.url)}")
            unknown = await http.delete(f"/engines/{name_of(engine.url)}")

    assert added.status_code == 200
    assert [(e["name"], e["weight"], e["model"], e["run"]) for e in listed] == [
        (name_of(engine.url), 2.0, "judge", "eval-*")
    ]
    assert (refused.status_code, wrong.status_code) == (401, 400)
    assert "weight" in wrong.text
    assert (removed.status_code, unknown.status_code) == (204, 404)


async def test_an_engine_added_at_one_gateway_serves_the_sessions_of_another(
    tmp_path: Path,
) -> None:
    """Two gateways of one home share one roster in the store."""
    async with (
        ScriptedEngine(LONG) as engine,
        LocalGateway(tmp_path) as here,
        LocalGateway(tmp_path) as there,
    ):
        control = {"authorization": f"Bearer {control_token(here.secret)}"}
        async with httpx.AsyncClient(timeout=60, headers=control) as http:
            await http.post(f"{here.url}/engines", json={"url": engine.url})
            key = await there.open("s")
            answer = await http.post(
                f"{there.url}/v1/chat/completions",
                json={"model": "policy", "messages": [{"role": "user", "content": "Go."}]},
                headers={"authorization": f"Bearer {key}"},
            )
            await http.delete(f"{there.url}/engines/{name_of(engine.url)}")
            listed = (await http.get(f"{here.url}/engines")).json()["engines"]

    assert answer.status_code == 200
    assert listed == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("GET", "/is_paused"),
        ("POST", "/start_weight_update"),
        ("POST", "/update_weights"),
        ("POST", "/finish_weight_update"),
        ("POST", "/collective_rpc"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/inference/v1/abort_requests"),
    ],
)
async def test_an_engines_own_routes_are_not_proxied(
    tmp_path: Path, method: str, path: str
) -> None:
    """Neither a session key nor the control token reaches an engine's control routes through the gateway."""
    async with (
        ScriptedEngine(LONG) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        keys = (await gateway.open("s"), control_token(gateway.secret))
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            statuses = [
                (
                    await http.request(method, path, headers={"authorization": f"Bearer {key}"})
                ).status_code
                for key in keys
            ]

    assert statuses == [404, 404]
