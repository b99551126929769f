"""If two gateways answer one session at once, one answer counts, and the later gateway gives the
same one."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.engines.engine_state import EngineState
from perdure.gateway.base import control_token
from perdure.storage.local_store import LocalStore
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from tests.gateway_pool import scripts


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(scripts(3)) as engine:
        yield engine


@pytest.fixture
async def gateways(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[list[LocalGateway]]:
    """Two gateways on two hosts that share only the store."""
    settings: dict[str, Any] = {
        "engine": {"url": engine.url, "kind": "vllm"},
        "store": LocalStore(tmp_path / "store"),
        "secret": "s" * 32,
    }
    async with (
        LocalGateway(tmp_path / "one", **settings) as one,
        LocalGateway(tmp_path / "other", **settings) as other,
    ):
        yield [one, other]


async def _ask(gateway: LocalGateway, key: str, messages: list[dict[str, Any]]) -> Any:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "m", "messages": messages}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        return answer.raise_for_status().json()


async def _ready(gateway: LocalGateway) -> None:
    """Knows that every engine is ready, so a session may get any of them."""
    headers = {"authorization": f"Bearer {control_token(gateway.secret)}"}
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(base_url=gateway.url, timeout=30, headers=headers) as client,
    ):
        while True:
            found = (await client.get("/engines")).raise_for_status().json()["engines"]
            if all(engine["state"] == EngineState.READY for engine in found):
                return
            await asyncio.sleep(0.01)


def _after(messages: list[dict[str, Any]], answer: Any) -> list[dict[str, Any]]:
    message = answer["choices"][0]["message"]
    call = message["tool_calls"][0]["id"]
    return [*messages, message, {"role": "tool", "tool_call_id": call, "content": "a"}]


async def test_an_answer_of_the_other_gateway_is_repeated(
    gateways: list[LocalGateway], engine: ScriptedEngine
) -> None:
    """A retry at another gateway gets the recorded answer without the engine."""
    one, other = gateways
    key = await one.open("s")
    await other.control.get("s")
    first = [{"role": "user", "content": "hi"}]
    answers = [await _ask(one, key, first), await _ask(other, key, first)]

    assert answers[0] == answers[1]
    assert engine.stats().calls == 1


async def test_a_late_turn_is_dropped_after_the_agent_continued(
    gateways: list[LocalGateway], engine: ScriptedEngine
) -> None:
    """The slower gateway gives the other one's answer and records nothing."""
    slow, other = gateways
    key = await slow.open("s")
    await other.control.get("s")
    first = [{"role": "user", "content": "hi"}]
    engine.control(kind="hang", times=1)
    late = asyncio.create_task(_ask(slow, key, first))
    while not engine.stats().faults["hang"]:  # probes are also in flight
        await asyncio.sleep(0.01)
    answer = await _ask(other, key, first)
    await _ask(other, key, _after(first, answer))
    engine.reset()

    assert await late == answer
    assert (await slow.control.get("s")).turns == 2


async def test_a_call_that_was_read_too_late_is_not_sampled(
    gateways: list[LocalGateway], engine: ScriptedEngine
) -> None:
    """A frozen gateway comes back. In its socket is a call that the agent gave up and that the other
    gateway answered."""
    one, late = gateways
    key = await one.open("s")
    first = [{"role": "user", "content": "hi"}]
    await _ask(one, key, _after(first, await _ask(one, key, first)))
    _send_and_hang_up(late, key, first)
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=late.url) as client:
        while 'code="client_closed_request"} 1.0' not in (await client.get("/metrics")).text:
            assert engine.stats().calls == 2
            await asyncio.sleep(0.01)

    assert (await late.control.get("s")).turns == 2
    assert engine.stats().calls == 2


def _send_and_hang_up(gateway: LocalGateway, key: str, messages: list[dict[str, Any]]) -> None:
    """Without a pause, so that the gateway, which runs in this process, sees both at once."""
    url, body = httpx.URL(gateway.url), json.dumps({"model": "m", "messages": messages}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    assert url.port is not None
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head.encode() + body)


async def test_a_session_keeps_its_engine_at_another_gateway(tmp_path: Path) -> None:
    """The engine of the newest turn, which the journal names, has the KV cache."""
    first = [{"role": "user", "content": "hi"}]
    async with ScriptedEngine(scripts(3)) as left, ScriptedEngine(scripts(3)) as right:
        settings: dict[str, Any] = {"engine": {"url": f"{left.url},{right.url}", "kind": "vllm"}}
        async with (
            LocalGateway(tmp_path, **settings) as one,
            LocalGateway(tmp_path, **settings) as other,
        ):
            await asyncio.gather(_ready(one), _ready(other))
            keys = [await one.open(f"s{number}") for number in range(12)]
            answers, here = [], []
            for key in keys:
                before = left.stats().calls
                answers.append(await _ask(one, key, first))
                here.append(left.stats().calls > before)
            again = []
            for key, answer in reversed(list(zip(keys, answers, strict=True))):
                before = left.stats().calls
                await _ask(other, key, _after(first, answer))
                again.append(left.stats().calls > before)

    assert again[::-1] == here


async def test_a_call_without_an_answer_is_known_until_the_next_answer(
    gateways: list[LocalGateway], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host must distinguish an agent that failed because of a silent gateway from one that ended
    by itself. So every process knows when the last call got no answer."""
    one, other = gateways
    key = await one.open("s")
    first = [{"role": "user", "content": "hi"}]
    for gateway in gateways:
        await _ready(gateway)
    monkeypatch.setattr("perdure.engines.pool.engine_pool.MOST_MOVES", 0)
    engine.control(kind="status")
    with pytest.raises(httpx.HTTPStatusError):
        await _ask(one, key, first)
    silent = await other.control.get("s")
    engine.reset()
    await _ask(other, key, first)

    assert silent.unanswered
    assert (await one.control.close("s")).unanswered == ""
