"""The local journal's promise: what was appended survives, one writer wins, damage is never guessed."""

import asyncio
import contextlib
import fcntl
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from perdure.errors import GatewayUnavailable
from perdure.gateway.journal import local as journals
from perdure.gateway.journal.base import Overtaken
from perdure.gateway.journal.encoding import JournalDamaged
from perdure.gateway.journal.local import FILE_NAME, LocalJournal


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[LocalJournal]:
    journal = LocalJournal(tmp_path)
    yield journal
    await journal.aclose()


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[LocalJournal]:
    """Another process's view of the same folder: nothing is shared in memory."""
    journal = LocalJournal(tmp_path)
    yield journal
    await journal.aclose()


@contextlib.contextmanager
def _file_limit(size: int) -> Iterator[None]:
    """The kernel refuses to grow a file over `size` bytes, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def _file(journal_folder: Path) -> Path:
    return journal_folder / "s" / FILE_NAME


async def test_records_come_back_in_order(journal: LocalJournal) -> None:
    """Records of one session are read in the order in which they were appended."""
    for number in range(5):
        await journal.append("s", {"number": number, "text": "a\nb\u00e9\ud800"}, position=number)

    assert [record["number"] for record in await journal.read("s")] == [0, 1, 2, 3, 4]


async def test_records_appended_together_keep_their_order(journal: LocalJournal) -> None:
    """Parallel turns of a session that name consecutive numbers are all committed."""
    appends = [journal.append("s", {"number": number}, position=number) for number in range(20)]
    await asyncio.gather(*appends)

    assert [record["number"] for record in await journal.read("s")] == [*range(20)]


async def test_reading_continues_where_it_ended(journal: LocalJournal, other: LocalJournal) -> None:
    """A process reads only what another one has added since."""
    await journal.append("s", {"number": 0}, position=0)
    await other.read("s")
    await journal.append("s", {"number": 1}, position=1)

    assert await other.read("s", after=1) == [{"number": 1}]
    assert await other.read("s", after=2) == []


async def test_a_session_that_was_not_opened_is_empty(
    journal: LocalJournal, tmp_path: Path
) -> None:
    """Reading what does not exist gives no records and creates nothing."""
    assert await journal.read("unknown") == []
    assert not (tmp_path / "unknown").exists()


@pytest.mark.parametrize("lost", [1, 7, 30])
async def test_a_torn_tail_is_cut(
    tmp_path: Path, journal: LocalJournal, other: LocalJournal, lost: int
) -> None:
    """A record cut off at any byte counts as never written, and appending continues."""
    await journal.append("s", {"number": 0}, position=0)
    await journal.append("s", {"number": 1, "text": "x" * 40}, position=1)
    data = _file(tmp_path).read_bytes()
    _file(tmp_path).write_bytes(data[:-lost])

    before = await other.read("s")
    await other.append("s", {"number": 2}, position=1)

    assert before == [{"number": 0}]
    assert await other.read("s") == [{"number": 0}, {"number": 2}]


async def test_a_tail_of_zeros_is_cut(tmp_path: Path, journal: LocalJournal) -> None:
    """Blocks that a power cut left unwritten are a torn tail too."""
    await journal.append("s", {"number": 0}, position=0)
    with _file(tmp_path).open("ab") as file:
        file.write(b"\0" * 100)

    assert await journal.read("s") == [{"number": 0}]


async def test_damage_before_the_tail_is_an_error(
    tmp_path: Path, journal: LocalJournal, other: LocalJournal
) -> None:
    """A flipped byte in an answered turn is reported, and the file is not changed."""
    await journal.append("s", {"number": 0}, position=0)
    await journal.append("s", {"number": 1}, position=1)
    data = bytearray(_file(tmp_path).read_bytes())
    data[data.index(b"number")] ^= 1
    _file(tmp_path).write_bytes(data)

    with pytest.raises(JournalDamaged, match="damaged"):
        await other.read("s")
    with pytest.raises(JournalDamaged, match="damaged"):
        await other.append("s", {"number": 2}, position=2)
    assert _file(tmp_path).read_bytes() == data


async def test_an_unusable_folder_stops_only_its_session(
    tmp_path: Path, journal: LocalJournal
) -> None:
    """An append that cannot be written raises, and other sessions continue."""
    await journal.append("s", {"number": 0}, position=0)
    (tmp_path / "blocked").write_text("a file where the session's folder should be")

    with pytest.raises(GatewayUnavailable, match="cannot be written"):
        await journal.append("blocked", {"number": 1}, position=0)
    await journal.append("s", {"number": 1}, position=1)

    assert await journal.read("s") == [{"number": 0}, {"number": 1}]


async def test_a_full_disk_leaves_no_half_record(tmp_path: Path, journal: LocalJournal) -> None:
    """What does not fit is not written at all; the session continues once there is space."""
    await journal.append("s", {"number": 0}, position=0)
    size = _file(tmp_path).stat().st_size
    with _file_limit(size + 100), pytest.raises(GatewayUnavailable, match="too large"):
        await journal.append("s", {"text": "x" * 500}, position=1)
    left = _file(tmp_path).stat().st_size
    await journal.append("s", {"number": 1}, position=1)

    assert left == size
    assert await journal.read("s") == [{"number": 0}, {"number": 1}]


async def test_one_of_two_writers_wins(journal: LocalJournal, other: LocalJournal) -> None:
    """Two processes that name the same number: one record is there, one writer was told."""
    outcomes = await asyncio.gather(
        journal.append("s", {"by": "one"}, position=0),
        other.append("s", {"by": "other"}, position=0),
        return_exceptions=True,
    )

    assert sorted(map(type, outcomes), key=str) == sorted([type(None), Overtaken], key=str)
    assert len(await journal.read("s")) == 1


async def test_a_zombie_is_fenced(journal: LocalJournal, other: LocalJournal) -> None:
    """A process that was suspended cannot overwrite what others wrote meanwhile."""
    await journal.append("s", {"number": 0}, position=0)
    await other.append("s", {"number": 1}, position=1)

    with pytest.raises(Overtaken):
        await journal.append("s", {"number": "stale"}, position=1)
    assert await journal.read("s") == [{"number": 0}, {"number": 1}]


async def test_a_gap_is_never_written(journal: LocalJournal) -> None:
    """A record whose predecessor failed is refused: numbers are consecutive."""
    with pytest.raises(GatewayUnavailable, match="record 0"):
        await journal.append("s", {"number": 1}, position=1)
    assert await journal.read("s") == []


async def test_a_process_that_hangs_stops_only_its_sessions(
    tmp_path: Path, journal: LocalJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a stopped process holds one session's file, others commit and that one is told."""
    monkeypatch.setattr(journals, "BUSY_LIMIT_S", 0.2)
    await journal.append("s", {"number": 0}, position=0)
    with _file(tmp_path).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        blocked = asyncio.create_task(journal.append("s", {"number": 1}, position=1))
        await journal.append("free", {"number": 0}, position=0)
        with pytest.raises(GatewayUnavailable, match="another gateway process"):
            await blocked
    await journal.append("s", {"number": 1}, position=1)

    assert len(await journal.read("s")) == 2


async def test_where_nothing_is_new_nobody_is_waited_for(
    tmp_path: Path,
    journal: LocalJournal,
    other: LocalJournal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each turn looks for other processes' turns; the file's size tells that there are none."""
    monkeypatch.setattr(journals, "BUSY_LIMIT_S", 0.2)
    await journal.append("s", {"number": 0}, position=0)
    with _file(tmp_path).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        unchanged = await journal.read("s", 1)
    await other.append("s", {"number": 1}, position=1)

    assert (unchanged, await journal.read("s", 1)) == ([], [{"number": 1}])


async def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    """Appends made before the close are durable after it."""
    journal = LocalJournal(tmp_path)
    appends = [asyncio.ensure_future(journal.append("s", {"n": n}, position=n)) for n in range(10)]
    await asyncio.sleep(0)
    await journal.aclose()
    await asyncio.gather(*appends)

    assert len(await LocalJournal(tmp_path).read("s")) == 10
