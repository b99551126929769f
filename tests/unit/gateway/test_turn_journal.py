"""The journal's contract: appended records survive, each number has one writer, and damage is
detected."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, StoreUnavailable
from perdure.gateway.journal.record_encoding import JournalDamaged
from perdure.gateway.journal.turn_journal import Journal, RecordNumberTaken, refuse_earlier
from perdure.settings.settings_tree import Settings
from perdure.storage import s3_client
from perdure.storage.base import Store
from perdure.storage.local_store import LocalStore
from perdure.storage.s3_store import S3Store
from tests import s3_server
from tests.s3_proxy import S3Proxy, lose_answer
from tests.unit.gateway.unsteady_store import UnsteadyStore

WRITERS, RECORDS = 4, 50
LOST = 0.3
"""Share of the requests whose response is lost."""


@pytest.fixture
def store() -> UnsteadyStore:
    return UnsteadyStore()


async def _write(store: Store, numbers: range) -> None:
    for n in numbers:
        await Journal(store).append("s", {"n": n}, position=n)


async def _numbers(store: Store, after: int = 0) -> list[int]:
    return [record["n"] for record in await Journal(store).read("s", after)]


async def test_records_are_read_back_unchanged(store: UnsteadyStore) -> None:
    """They come in order, from any number on, with any text."""
    journal = Journal(store)
    await _write(store, range(40))
    await journal.append("s", {"n": 40, "text": "a\nb\u00e9\ud800"}, position=40)

    for after in (0, 1, 15, 16, 39, 40, 41):
        assert await _numbers(store, after) == [*range(after, 41)]
    assert (await journal.read("s"))[40]["text"] == "a\nb\u00e9\ud800"
    assert await journal.read("never opened") == []


async def test_a_read_without_news_is_one_request(
    store: UnsteadyStore,
) -> None:
    """Each turn begins with such a read. The turn itself is one write."""
    await _write(store, range(3))
    store.calls.clear()
    assert await _numbers(store, 3) == []
    await _write(store, range(3, 4))

    assert store.calls == {"get": 1, "put": 1}


async def test_a_process_that_slept_cannot_overwrite_newer_records(
    store: UnsteadyStore,
) -> None:
    """The number of its record is taken."""
    await _write(store, range(2))

    with pytest.raises(RecordNumberTaken):
        await Journal(store).append("s", {"n": "stale"}, position=1)
    assert await _numbers(store) == [0, 1]


async def test_a_record_whose_response_was_lost_is_found(store: UnsteadyStore) -> None:
    """The turn fails, and the repeated call finds its record."""
    await _write(store, range(2))
    store.answers_lost = True
    with pytest.raises(StoreUnavailable):
        await _write(store, range(2, 3))
    store.answers_lost = False

    assert await _numbers(store, 2) == [2]


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "longer"])
@pytest.mark.parametrize("at", [0, 2, 20])
async def test_damage_keeps_the_records_before_it(
    store: UnsteadyStore, damage: str, at: int
) -> None:
    """A record that is missing or changed is an error; it is never skipped."""
    await _write(store, range(22))
    name = store.below("journal/s/")[at]
    data = store.objects.pop(name)
    if damage != "gone":
        changed = {"cut": data[:-3], "flipped": data.replace(b"n", b"m"), "longer": data + data}
        store.objects[name] = changed[damage]

    with pytest.raises(JournalDamaged, match=f"{name} is missing or damaged") as found:
        await Journal(store).read("s")
    assert [record["n"] for record in found.value.intact] == [*range(at)]


async def test_a_forgotten_session_leaves_nothing(tmp_path: Path) -> None:
    """Neither an object nor a folder remains."""
    store = LocalStore(tmp_path)
    await _write(store, range(20))
    await Journal(store).append("other", {"n": 0}, position=0)
    for _ in range(2):
        await Journal(store).forget("s")

    assert await _numbers(store) == []
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["other"]


async def test_a_half_deleted_session_does_not_read_as_a_shorter_one(store: UnsteadyStore) -> None:
    """Otherwise its turns would be written again without the deleted ones."""
    await _write(store, range(20))
    delete = store.delete_many

    async def killed_after_the_first(names: list[str]) -> None:
        await delete(names[:1])
        raise StoreUnavailable("killed")

    store.delete_many = killed_after_the_first  # type: ignore[assignment,method-assign]
    with pytest.raises(StoreUnavailable):
        await Journal(store).forget("s")
    with pytest.raises(JournalDamaged):
        await Journal(store).read("s")
    store.delete_many = delete  # type: ignore[method-assign]
    await Journal(store).forget("s")
    assert store.below("journal/s/") == []


@pytest.mark.parametrize("name", ["claim-00000001", "00000000", "partial-0a1b"])
async def test_a_session_of_an_earlier_version_is_refused_with_the_fix(
    store: UnsteadyStore, name: str
) -> None:
    """Its records have another form."""
    await store.put(f"journal/s/{name}", b"")

    with pytest.raises(ConfigurationError, match="finish the run with that version, or delete"):
        await Journal(store).read("s")


def test_a_home_of_an_earlier_version_is_refused_with_the_fix(tmp_path: Path) -> None:
    """That version kept the turns of open rollouts in files. An empty folder is accepted."""
    settings = Settings(home=tmp_path)
    session = tmp_path / "journal/s"
    session.mkdir(parents=True)
    refuse_earlier(settings)
    (session / "journal.log").touch()

    with pytest.raises(ConfigurationError, match="finish their runs with that version, or delete"):
        refuse_earlier(settings)


# --- races ---------------------------------------------------------------------------------------


class Race:
    """Writers of one session, each in its own process, until it has all its records."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.acknowledged: list[tuple[int, str]] = []

    async def play(self) -> None:
        async with asyncio.timeout(110):
            await asyncio.gather(*(self._writer(number) for number in range(WRITERS)))

    async def check(self) -> None:
        """Each number has one writer, and no acknowledged record is missing."""
        words = [record["word"] for record in await Journal(self.store).read("s")]
        numbers = [number for number, _ in self.acknowledged]
        assert len(numbers) == len(set(numbers))
        assert [(n, word) for n, word in self.acknowledged if words[n] != word] == []
        assert len(words) == len(set(words)) >= RECORDS

    async def _writer(self, writer: int) -> None:
        journal, known, serial = Journal(self.store), 0, 0
        while known < RECORDS:
            serial += 1
            word = f"{writer}/{serial}"
            try:
                known += len(await journal.read("s", known))
                if self.random.random() < 0.5:
                    await asyncio.sleep(0)
                await journal.append("s", {"word": word}, position=known)
            except (RecordNumberTaken, StoreUnavailable):
                continue
            self.acknowledged.append((known, word))
            known += 1


@pytest.fixture
def folder(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Proxy]:
    with s3_server.with_bucket("races") as server:
        proxy = S3Proxy(server.url)
        yield proxy
        proxy.close()


@pytest.fixture
async def bucket(
    s3: S3Proxy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[S3Store]:
    monkeypatch.setattr(s3_client, "PAUSES_S", (0.01, 0.01, 0.01))
    store = S3Store(f"s3://races/{request.node.name}", endpoint_url=s3.url)
    yield store
    s3.heal()


@pytest.mark.parametrize("seed", range(8))
async def test_writers_in_memory_with_late_writes_and_lost_responses(seed: int) -> None:
    """Half of the seeds also lose 30 % of the responses."""
    store = UnsteadyStore(seed, lost=LOST * (seed % 2))
    race = Race(store, seed)
    await race.play()
    await asyncio.sleep(0.05)  # writes that were sent have arrived
    store.heal()

    await race.check()


@pytest.mark.parametrize("seed", range(2))
async def test_writers_in_a_folder(folder: LocalStore, seed: int) -> None:
    """The file system decides which writer gets a number."""
    race = Race(folder, seed)
    await race.play()
    await race.check()


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.longer), 1])
async def test_writers_over_s3(bucket: S3Store, s3: S3Proxy, seed: int) -> None:
    """The conditional write decides. In one of the two seeds, 30 % of the responses are lost."""
    if seed % 2:
        s3.play(lose_answer, share=LOST, seed=seed)
    race = Race(bucket, seed)
    await race.play()
    s3.heal()

    await race.check()
