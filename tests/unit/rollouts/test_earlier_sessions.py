"""A new attempt replays the earlier one that recorded the most turns."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from perdure.rollouts.gateway_session.replayed_attempt import find_longest_recording
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LocalGateway]:
    async with (
        ScriptedEngine({"default": {"turns": [{"content": "Hi."}]}}) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        yield gateway


async def _attempt(gateway: LocalGateway, session_id: str, turns: int) -> None:
    key = await gateway.open(session_id)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for number in range(turns):
            said = {"model": "m", "messages": [{"role": "user", "content": str(number)}]}
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.post("/v1/chat/completions", json=said, headers=headers)
            answer.raise_for_status()


async def test_an_attempt_that_died_while_it_booted_is_passed_over(gateway: LocalGateway) -> None:
    """The second attempt never opened a session, so the third replays the first."""
    await _attempt(gateway, "one", 2)

    assert await find_longest_recording(gateway.control, ["one", "two"]) == "one"


async def test_an_attempt_that_died_while_it_replayed_is_passed_over(gateway: LocalGateway) -> None:
    """Such an attempt recorded less than what it replayed. Of two with equal turns, the later one
    is taken."""
    for session_id, turns in (("one", 2), ("two", 2), ("three", 1), ("four", 0)):
        await _attempt(gateway, session_id, turns)

    assert await find_longest_recording(gateway.control, ["one", "two", "three", "four"]) == "two"


async def test_nothing_recorded_is_nothing_to_replay(gateway: LocalGateway) -> None:
    """If no earlier attempt has a recorded turn, there is no session to replay."""
    await gateway.open("one")

    assert await find_longest_recording(gateway.control, ["one", "two"]) is None
