"""How a gateway finds its engine, and how hosted turns are recorded."""

import asyncio
import json
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from perdure.dialects.base import ModelRequest
from perdure.engines.clients import hosted_requests
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.configured_engine import ConfiguredEngine, check_engine_settings, engine_specs
from perdure.engines.engine_roster import InMemoryRoster, StoredRoster, add_engine, roster_key
from perdure.engines.engine_state import EngineRecord, EngineSpec
from perdure.engines.pool.engine_pool import EnginePool
from perdure.episodes.turns_parquet import decode
from perdure.errors import ConfigurationError, GatewayUnavailable
from perdure.gateway.turns.sampling_params import chat_request
from perdure.home_folder import load_secret
from perdure.settings.settings_tree import Settings
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import Sampling

SCRIPTS = {
    "default": {
        "turns": [
            {"content": "Look:", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
            {"content": "Done."},
        ]
    }
}


@pytest.fixture(autouse=True)
def _no_engine_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(SCRIPTS) as engine:
        yield engine


async def _converse(gateway: LocalGateway, key: str, **fields: Any) -> list[dict[str, Any]]:
    """`fields`: additional fields of each request."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
        for _ in range(2):
            answer = await http.post(
                "/v1/chat/completions",
                json={"model": "policy", "messages": messages, **fields},
                headers={"authorization": f"Bearer {key}"},
            )
            message = answer.json()["choices"][0]["message"]
            calls = message.get("tool_calls", ())
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in calls]
            messages = [*messages, message, *results]
    return messages


@pytest.mark.parametrize("variable", ["OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"])
async def test_hosted_turns_are_passed_through_and_not_trainable(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A hosted API serves a whole conversation; its turns have no ids and say `trainable:
    false`."""
    monkeypatch.setenv(variable, engine.url)
    async with LocalGateway(tmp_path) as gateway:
        messages = await _converse(gateway, await gateway.open("s"))
        summary = await gateway.control.close("s")
        turns = decode((await gateway.store.get(turns_key_of("s"))).data)

    assert messages[-1]["content"] == "Done."
    assert (summary.turns, summary.trainable, summary.bridge_misses) == (2, False, {})
    assert [(t.trainable, t.prompt_ids, t.completion_ids) for t in turns] == [(False, (), ())] * 2
    assert engine.stats().calls == 0


@pytest.mark.parametrize("hosted", [True, False])
async def test_the_tools_of_an_agent_are_recorded_where_they_change(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, hosted: bool
) -> None:
    """Trainers need them for a chat template, so they are recorded once, with the first turn that
    has them."""
    bash = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    if hosted:
        monkeypatch.setenv("OPENAI_BASE_URL", engine.url)
    async with LocalGateway(tmp_path, engine={} if hosted else {"url": engine.url}) as gateway:
        await _converse(gateway, await gateway.open("s"), tools=[bash])
        await gateway.control.close("s")
        turns = decode((await gateway.store.get(turns_key_of("s"))).data)

    first, second = (json.loads(turn.tools or "[]") for turn in turns)
    assert [one["function"]["name"] for one in first] == ["bash"]
    assert second == []


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_a_token_endpoint_is_detected(
    tmp_path: Path, engine: ScriptedEngine, suffix: str
) -> None:
    """With the kind auto, a server that has vLLM's token route is used through it."""
    async with LocalGateway(tmp_path, engine={"url": engine.url + suffix}) as gateway:
        await _converse(gateway, await gateway.open("s"))
        summary = await gateway.control.get("s")

    assert summary.trainable
    assert engine.stats().calls == 2


async def test_a_vllm_from_mini_swe_agents_variable_gives_exact_tokens(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOSTED_VLLM_API_BASE names a vLLM server, not a hosted API."""
    monkeypatch.setenv("HOSTED_VLLM_API_BASE", f"{engine.url}/v1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    async with LocalGateway(tmp_path) as gateway:
        await _converse(gateway, await gateway.open("s"))
        summary = await gateway.control.get("s")

    assert summary.trainable


async def test_the_scripted_engine_reports_its_counts_over_http(engine: ScriptedEngine) -> None:
    """/stats is a JSON document, also if calls were counted by session."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 4}}
        await http.post("/inference/v1/generate", json=body, headers={"x-session-id": "s"})
        told = await http.get("/stats")

    assert told.json()["calls_by_session"] == {"s": 1}


async def test_a_gateway_waits_for_an_engine_that_starts_later(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """A call meets a failed engine, and the session continues once it is back."""
    engine.control(kind="reset_before", times=2)
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
        messages = await _converse(gateway, await gateway.open("s"))

    assert messages[-1]["content"] == "Done."


@pytest.mark.parametrize("kind", ["vllm", "auto"])
async def test_engines_are_known_before_the_first_turn(
    tmp_path: Path, engine: ScriptedEngine, kind: str
) -> None:
    """A trainer can publish to a stack that has just started, because its engines are already
    known."""
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": kind}) as gateway:
        roster = StoredRoster(gateway.store, roster_key(gateway.secret))
        async with asyncio.timeout(30):
            while not any(found.serves for found in (await roster.read()).engines):
                await asyncio.sleep(0.02)


async def test_engines_added_to_an_idle_gateway_are_known(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """Another process registers them in the roster, and they are checked without a turn."""
    async with LocalGateway(tmp_path) as gateway, new_client() as client:
        roster = StoredRoster(gateway.store, roster_key(gateway.secret))
        other = EnginePool(roster, client)
        await add_engine(other.fleet, EngineSpec(engine.url), "policy")
        await other.aclose()
        async with asyncio.timeout(30):
            while not any(found.serves for found in (await roster.read()).engines):
                await asyncio.sleep(0.02)


REFUSALS = {
    "model": (
        (404, "The model `x` does not exist."),
        "answered 404: The model `x` does not exist. Name a model that it serves with --model",
    ),
    "key": (
        (401, "Incorrect API key provided: sk-proj-0123456789abcdefghij"),
        "answered 401: Incorrect API key provided: …. Check the key in OPENAI_API_KEY",
    ),
    "context": (
        (400, "This model's maximum context length is 4096 tokens, and you asked for 9000"),
        "asked for 9000 Raise sampling.max_context_tokens or the server's --max-model-len",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_the_first_refusal_of_an_endpoint_is_reported_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The session keeps the endpoint's own sentence for an agent that then ends, but never the
    key."""
    (status, message), told = REFUSALS[case]
    monkeypatch.setattr(hosted_requests, "FIRST_PATIENCE_S", 0.0)
    asked = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            body = json.dumps({"error": {"message": message, "code": case}}).encode()
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keeps log lines out of the test output."""

    monkeypatch.setenv("OPENAI_API_KEY", "sk-proj-0123456789abcdefghij")
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        async with LocalGateway(tmp_path) as gateway:
            key = await gateway.open("s")
            with pytest.raises(KeyError, match="choices"):
                await _converse(gateway, key)
            summary = await gateway.control.close("s")
        server.shutdown()

    assert told in summary.refused
    assert (asked, summary.turns) == (["/v1/chat/completions"], 0)


def test_the_per_turn_cap_holds_for_hosted_apis() -> None:
    """The session's max_tokens and a changed temperature reach the API; defaults are not sent."""
    request = ModelRequest("m", [], None, {}, 500, {"model": "m", "max_completion_tokens": 500})
    rules = Sampling(temperature=0.5, max_tokens_per_turn=100)

    assert chat_request(rules, request, None) == {
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 100,
    }


def test_a_wrong_engine_kind_is_named(tmp_path: Path) -> None:
    """The message lists the kinds."""
    with pytest.raises(ConfigurationError, match=r"PERDURE_ENGINE__KIND is 'llama'.*vllm"):
        check_engine_settings(Settings(home=tmp_path, engine={"kind": "llama"}))


@pytest.mark.parametrize("kind", ["vllm", "auto"])
async def test_limits_of_an_engine_with_token_ids_are_refused(
    tmp_path: Path, engine: ScriptedEngine, kind: str
) -> None:
    """No call would obey the limits. The gateway reports this at its start or at the first call."""
    named = {"url": engine.url, "kind": kind, "limits": {"requests": {"day": 1}}}
    if kind == "vllm":
        with pytest.raises(ConfigurationError, match="PERDURE_ENGINE__LIMITS is for hosted APIs"):
            check_engine_settings(Settings(home=tmp_path, engine=named))
        return
    async with LocalGateway(tmp_path, engine=named) as gateway:
        key = await gateway.open("s")
        with pytest.raises(KeyError, match="choices"):
            await _converse(gateway, key)
        summary = await gateway.control.get("s")

    assert "PERDURE_ENGINE__LIMITS is for hosted APIs" in summary.unanswered


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    """Every process on one home derives the same keys."""
    settings = Settings(home=tmp_path)

    assert load_secret(settings) == load_secret(settings)
    assert not list((tmp_path / "run").glob(".secret.*"))


def test_a_secret_from_the_settings_is_used_and_must_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PERDURE_SECRET is for several hosts; a short one is refused."""
    monkeypatch.setenv("PERDURE_SECRET", "0123456789abcdef")
    assert load_secret(Settings(home=tmp_path)) == b"0123456789abcdef"

    monkeypatch.setenv("PERDURE_SECRET", "short")
    with pytest.raises(ConfigurationError, match="PERDURE_SECRET is shorter"):
        load_secret(Settings(home=tmp_path))


async def test_engines_of_other_gateways_settings_are_not_waited_for(tmp_path: Path) -> None:
    """A gateway without an engine reports at once that none is configured."""
    roster, url = InMemoryRoster(), "http://127.0.0.1:9"
    theirs = EngineRecord(name="a", url=url, model="m", generation=1, from_settings=True)
    await roster.change(lambda known: known.having(theirs))
    async with new_client() as client:
        engines = ConfiguredEngine(Settings(home=tmp_path), client, roster)
        with pytest.raises(GatewayUnavailable, match="no engine is configured"):
            await engines.current()


@pytest.mark.parametrize("weight", ["x", "0", "inf"])
def test_a_weight_that_is_not_a_positive_number_is_refused(weight: str) -> None:
    """The message names the setting, the wrong part, and the valid values."""
    with pytest.raises(ConfigurationError, match=rf"'http://a={weight}' must be a number above 0"):
        engine_specs(f"http://a={weight}", "vllm")
