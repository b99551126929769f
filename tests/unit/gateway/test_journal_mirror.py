"""The journal on a host's disk, which the store follows."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import GatewayUnavailable, StoreUnavailable
from perdure.gateway.journal.base import Overtaken
from perdure.gateway.journal.local import LocalJournal
from perdure.gateway.journal.mirror import MirroredJournal
from perdure.gateway.journal.parts import Parts
from perdure.gateway.journal.store import StoreJournal
from perdure.storage.base import Stored
from perdure.storage.local import LocalStore


class Weather(LocalStore):
    """A store that can be away, and whose answers can be lost after the work was done."""

    away = False
    answers_lost = False

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        self._check()
        done = await super().put_if_absent(key, data)
        if self.answers_lost:
            raise StoreUnavailable("the answer was lost")
        return done

    async def get(self, key: str) -> Stored:
        self._check()
        return await super().get(key)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[str]:
        self._check()
        async for key in super().list(prefix, after=after):
            yield key

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("the store is away")


@pytest.fixture
def store(tmp_path: Path) -> Weather:
    return Weather(tmp_path / "store")


def _mirrored(disk: Path, store: LocalStore) -> MirroredJournal:
    """A host's journal; it uploads at `aclose`, or at once where a test waits for that."""
    return MirroredJournal(LocalJournal(disk), Parts(store), pause_s=0)


async def test_another_host_takes_a_session_over(tmp_path: Path, store: Weather) -> None:
    """A host that never saw a session continues it from the parts of a lost host."""
    gone = _mirrored(tmp_path / "gone", store)
    for number in range(3):
        await gone.append("s", {"n": number}, position=number)
    await gone.aclose()
    next_host = _mirrored(tmp_path / "next", store)
    before = await next_host.read("s")
    await next_host.append("s", {"n": 3}, position=3)
    await next_host.aclose()

    assert before == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [record["n"] for record in await Parts(store).read("s")] == [0, 1, 2, 3]


async def test_a_host_that_comes_back_reads_what_others_did(tmp_path: Path, store: Weather) -> None:
    """Records that another host added meanwhile come to this host's disk."""
    first = _mirrored(tmp_path / "first", store)
    await first.append("s", {"n": 0}, position=0)
    await first.aclose()
    other = _mirrored(tmp_path / "other", store)
    await other.read("s")
    await other.append("s", {"n": 1}, position=1)
    await other.aclose()

    back = _mirrored(tmp_path / "first", store)
    assert await back.read("s") == [{"n": 0}, {"n": 1}]
    await back.aclose()


async def test_two_processes_of_a_host_upload_once(tmp_path: Path, store: Weather) -> None:
    """Processes that share a disk upload every record exactly once, no matter which of them wrote it."""
    one, other = _mirrored(tmp_path / "h", store), _mirrored(tmp_path / "h", store)
    for number in range(0, 6, 2):
        await one.read("s")
        await one.append("s", {"n": number}, position=number)
        await other.read("s")
        await other.append("s", {"n": number + 1}, position=number + 1)
    await asyncio.gather(one.aclose(), other.aclose())

    assert [record["n"] for record in await Parts(store).read("s")] == [*range(6)]


async def test_a_longer_part_of_another_process_is_no_other_host(
    tmp_path: Path, store: Weather
) -> None:
    """A process of the host uploads more records than this one has just read: the session lives on."""
    other = _mirrored(tmp_path / "h", store)

    class Slow(Parts):
        """The other process writes and uploads between this one's look at the disk and its upload."""

        overtaken = False

        async def put_records(self, session_id: str, first: int, records: Any) -> bool:
            if not self.overtaken:
                self.overtaken = True
                await other.append("s", {"n": 1}, position=1)
                await other.aclose()
            return await super().put_records(session_id, first, records)

    one = MirroredJournal(LocalJournal(tmp_path / "h"), Slow(store), pause_s=0)
    await one.append("s", {"n": 0}, position=0)
    await one.aclose()

    assert await Parts(store).read("s") == [{"n": 0}, {"n": 1}]
    assert await one.read("s") == [{"n": 0}, {"n": 1}]


async def test_a_session_may_grow_while_it_is_met(tmp_path: Path, store: Weather) -> None:
    """Records that another process of the host writes and uploads meanwhile are no conflict."""
    one = _mirrored(tmp_path / "h", store)
    await one.append("s", {"n": 0}, position=0)
    await one.aclose()
    busy = _mirrored(tmp_path / "h", store)

    class Growing(Parts):
        grown = False

        async def read(self, session_id: str, after: int = 0) -> list[dict[str, Any]]:
            if not self.grown:
                self.grown = True
                await busy.append("s", {"n": 1}, position=1)
                await busy.aclose()
            return await super().read(session_id, after)

    met = MirroredJournal(LocalJournal(tmp_path / "h"), Growing(store), pause_s=0)
    assert await met.read("s") == [{"n": 0}, {"n": 1}]
    await met.aclose()


async def test_a_killed_processs_records_are_uploaded(tmp_path: Path, store: Weather) -> None:
    """What a process wrote and did not upload goes up when another one meets the session."""
    killed = LocalJournal(tmp_path / "h")
    await killed.append("s", {"n": 0}, position=0)
    survivor = _mirrored(tmp_path / "h", store)
    await survivor.read("s")
    await survivor.aclose()
    await killed.aclose()

    assert await Parts(store).read("s") == [{"n": 0}]


async def test_a_store_that_is_away_does_not_stop_a_turn(tmp_path: Path, store: Weather) -> None:
    """With `local` durability answers need the disk only; parts follow when the store is back."""
    journal = _mirrored(tmp_path / "h", store)
    await journal.append("s", {"n": 0}, position=0)
    store.away = True
    await journal.append("s", {"n": 1}, position=1)
    assert len(await journal.read("s")) == 2
    store.away = False
    await journal.aclose()

    assert [record["n"] for record in await Parts(store).read("s")] == [0, 1]


async def test_one_of_two_hosts_that_continued_a_session_gives_it_up(
    tmp_path: Path, store: Weather
) -> None:
    """The host whose records are not in the store refuses the session; no record is mixed in."""
    shared = _mirrored(tmp_path / "a", store)
    await shared.append("s", {"n": 0}, position=0)
    await shared.aclose()
    cut_off = LocalJournal(tmp_path / "a")
    await cut_off.append("s", {"n": "cut off"}, position=1)
    other = _mirrored(tmp_path / "b", store)
    await other.read("s")
    await other.append("s", {"n": "other"}, position=1)
    await other.aclose()

    back = _mirrored(tmp_path / "a", store)
    with pytest.raises(GatewayUnavailable, match="another host continued"):
        await back.read("s")
    with pytest.raises(GatewayUnavailable, match="another host continued"):
        await back.append("s", {"n": 2}, position=2)
    assert await Parts(store).read("s") == [{"n": 0}, {"n": "other"}]
    await asyncio.gather(back.aclose(), cut_off.aclose())


async def test_changing_the_setting_keeps_sessions(tmp_path: Path, store: Weather) -> None:
    """After `local` became `store`, the records on this host's disk are uploaded first."""
    local = LocalJournal(tmp_path / "h")
    await local.append("s", {"n": 0}, position=0)
    journal = StoreJournal(store, MirroredJournal(local, Parts(store)).adopt)
    before = await journal.read("s")
    with pytest.raises(Overtaken):  # the session closes its parts for gateways with `local`
        await journal.append("s", {"n": 1}, position=1)
    await journal.append("s", {"n": 1}, position=2)

    assert before == [{"n": 0}]
    assert await StoreJournal(store).read("s") == [{"n": 0}, {"kind": "moved"}, {"n": 1}]
    await asyncio.gather(local.aclose(), journal.aclose())


async def test_a_host_with_another_setting_is_told_so(tmp_path: Path, store: Weather) -> None:
    """A gateway with `local` cannot continue a session of a gateway with `store`, nor hide it."""
    local = _mirrored(tmp_path / "h", store)
    await local.append("s", {"n": 0}, position=0)
    await local.aclose()
    journal = StoreJournal(store)
    with pytest.raises(Overtaken):
        await journal.append("s", {"n": 1}, position=1)
    await journal.append("s", {"n": 1}, position=2)

    back = _mirrored(tmp_path / "h", store)
    with pytest.raises(GatewayUnavailable, match="PERDURE_GATEWAY__DURABILITY"):
        await back.read("s")
    elsewhere = _mirrored(tmp_path / "other", store)
    with pytest.raises(GatewayUnavailable, match="PERDURE_GATEWAY__DURABILITY"):
        await elsewhere.read("s")
    await asyncio.gather(back.aclose(), elsewhere.aclose(), journal.aclose())
