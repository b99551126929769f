"""Damaged or truncated journals: the session reports it at once, and the next attempt replays the
rest."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.errors import NotFound
from perdure.gateway.base import SessionSpec, SessionSummary
from perdure.storage.local_store import LocalStore
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from tests.gateway_pool import scripts

TURNS = 6
Message = dict[str, Any]


class Stand:
    """A home whose gateway can be stopped and restarted."""

    def __init__(self, folder: Path, engine: ScriptedEngine) -> None:
        self._folder, self._engine = folder, engine
        self.store = folder / "store"
        self._settings: dict[str, Any] = {
            "engine": {"url": engine.url, "kind": "vllm"},
            "store": LocalStore(self.store),
            "secret": "s" * 32,
        }

    def gateway(self) -> LocalGateway:
        return LocalGateway(self._folder, **self._settings)

    @property
    def records(self) -> list[Path]:
        """The first record opens the session; one record for each turn follows."""
        return sorted(self.store.glob("journal/one/*"))

    @property
    def sampled(self) -> int:
        return self._engine.stats().calls


@pytest.fixture
async def engine() -> Any:
    async with ScriptedEngine(scripts(TURNS + 3)) as engine:
        yield engine


@pytest.fixture
def stand(tmp_path: Path, engine: ScriptedEngine) -> Stand:
    return Stand(tmp_path, engine)


def _spec(session_id: str, replay_of: str | None = None) -> SessionSpec:
    return SessionSpec(
        session_id=session_id,
        turns_key=f"{session_id}.parquet",
        labels={"rollout": "rollout/r/i/0"},
        replay_of=replay_of,
    )


async def _open(gateway: LocalGateway, session_id: str, replay_of: str | None = None) -> str:
    await gateway.control.open(_spec(session_id, replay_of))
    return gateway.control.key(session_id)


async def _ask(gateway: LocalGateway, key: str, messages: list[Message]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "m", "messages": messages}
        return await client.post("/v1/chat/completions", json=body, headers=headers)


async def _work(
    gateway: LocalGateway, key: str, turns: int, messages: list[Message] | None = None
) -> list[Message]:
    """The agent's next request."""
    messages = messages or [{"role": "user", "content": "Fix it."}]
    for _ in range(turns):
        answer = (await _ask(gateway, key, messages)).raise_for_status().json()
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call, "content": "a"}
        messages = [*messages, message, result]
    return messages


async def _ends_and_is_replayed(
    stand: Stand, gateway: LocalGateway, messages: list[Message], whole: int
) -> SessionSummary:
    """The call is refused, and the next attempt samples only the lost turns."""
    refused = await _ask(gateway, gateway.control.key("one"), messages)
    found = await gateway.control.get("one")
    before = stand.sampled
    await _work(gateway, await _open(gateway, "two", "one"), TURNS)

    assert (refused.status_code, found.open) == (403, False)
    assert stand.sampled - before == TURNS - whole
    assert (await gateway.control.get("two")).replayed_turns == whole
    return found


def _gone(path: Path) -> None:
    path.unlink()


def _halved(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _flipped(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


@pytest.mark.parametrize("damage", [_gone, _halved, _flipped])
async def test_one_damaged_record_ends_the_attempt_and_the_turns_before_it_are_replayed(
    stand: Stand, damage: Callable[[Path], None]
) -> None:
    """Users need not delete a file: the damaged session refuses calls, writes nothing into the gap,
    and its successor opens."""
    async with stand.gateway() as gateway:
        messages = await _work(gateway, await _open(gateway, "one"), TURNS)
    damage(stand.records[3])
    async with stand.gateway() as gateway:
        left = len(stand.records)
        found = await _ends_and_is_replayed(stand, gateway, messages, whole=2)
        looked = await asyncio.gather(*(gateway.control.look(one) for one in ("one", "two")))
        closed = await gateway.control.close("one")
        after = len(stand.records)
        await gateway.control.forget("one")

    assert "journal/one/000003 is missing or damaged" in found.damaged
    assert found.turns == 2
    assert [bool(one.damaged) for one in looked] == [True, False]
    assert (closed.damaged, after) == (found.damaged, left)
    assert not (stand.store / "one.parquet").exists()
    assert stand.records == []


async def test_a_record_lost_under_a_running_gateway_ends_the_attempt_at_its_close(
    stand: Stand,
) -> None:
    """The gateway still has the turns in memory, but closes the session from its journal."""
    async with stand.gateway() as gateway:
        key = await _open(gateway, "one")
        messages = await _work(gateway, key, 3)
        _gone(stand.records[3])
        await _work(gateway, key, 1, messages)
        closed = await gateway.control.close("one")

    assert "journal/one/000003 is missing" in closed.damaged


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_journal_without_its_last_records_lacks_turns_that_the_agent_has(
    stand: Stand, lost: int
) -> None:
    """The agent sends back the id of a tool call that only this gateway can mint, but that no turn
    has."""
    async with stand.gateway() as gateway:
        messages = await _work(gateway, await _open(gateway, "one"), TURNS)
    for record in stand.records[-lost:]:
        record.unlink()
    async with stand.gateway() as gateway:
        found = await _ends_and_is_replayed(stand, gateway, messages, whole=TURNS - lost)
    async with stand.gateway() as gateway:
        again = await gateway.control.get("one")

    assert "lacks the turn of tool call call_" in found.damaged
    assert again.damaged == found.damaged


async def test_tool_calls_that_are_not_this_rollouts_are_no_lost_turns(stand: Stand) -> None:
    """A history of another rollout, ids that the harness rewrote, and a compacted history are
    answered."""
    async with stand.gateway() as gateway:
        foreign = SessionSpec(session_id="else", turns_key="t", labels={"rollout": "rollout/r/j/0"})
        await gateway.control.open(foreign)
        other = await _work(gateway, gateway.control.key("else"), 2)
        key = await _open(gateway, "one")
        messages = await _work(gateway, key, 2)
        renamed = {**messages[1], "tool_calls": [{**messages[1]["tool_calls"][0], "id": "fc_1"}]}
        compacted = [{"role": "user", "content": "Go on from here."}, *messages[3:]]
        for asked in ([*other], [messages[0], renamed, messages[0]], compacted):
            (await _ask(gateway, key, asked)).raise_for_status()
        summary = await gateway.control.get("one")

    assert (summary.damaged, summary.turns) == ("", 5)


async def test_a_lost_turns_file_is_made_again_from_the_journal(stand: Stand) -> None:
    """It equals the first file, whose digest the closed session reports, also after a restart."""
    file = stand.store / "one.parquet"
    async with stand.gateway() as gateway:
        await _work(gateway, await _open(gateway, "one"), 3)
        closed = await gateway.control.close("one")
    first = file.read_bytes()
    file.unlink()
    async with stand.gateway() as gateway:
        again = await gateway.control.write_turns("one")
        await gateway.control.forget("one")
        with pytest.raises(NotFound):
            await gateway.control.write_turns("one")

    assert file.read_bytes() == first
    assert closed.turns_sha256 == again.turns_sha256 == hashlib.sha256(first).hexdigest()
