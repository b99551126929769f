"""A worker process reads a rollout's row and the record of its sandbox only once."""

from collections import Counter
from pathlib import Path

from perdure.instances import instance_catalog
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import CHECKPOINT, BootRecord, init_metadata
from perdure.rollouts.stage_services import Services
from perdure.rollouts.worker_memory import Memory
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Stored
from perdure.storage.local_store import LocalStore
from perdure.types import Grading, Instance, RolloutRequest, Source, SourceKind
from tests.unit.rollouts.one_try import OneTry

ROW = Instance(
    instance_id="add-1",
    dataset="toy",
    problem_statement="-",
    source=Source(kind=SourceKind.BLOB, key="blobs/x"),
    grading=Grading(test_cmd="pytest"),
)
REQUEST = RolloutRequest(run_id="r1", instance=ROW.ref, agent="nop", sandbox="local")


class CountingStore(LocalStore):
    """Counts reads by the last part of the key."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: Counter[str] = Counter()

    async def get(self, key: str) -> Stored:
        self.read[key.rsplit("/", 1)[-1]] += 1
        return await super().get(key)


def services(folder: Path) -> tuple[Services, CountingStore]:
    store = CountingStore(folder / "store")
    found = Services(Settings(home=folder / "home", sandbox={"allow_local": True}))
    found.__dict__["store"] = store
    return found, store


async def stage(found: Services, play: str, *, first: bool = False) -> Job:
    return await Job.of(found, Attempt(request=REQUEST, attempt=1), OneTry(play), first=first)


async def test_a_play_reads_its_row_once(tmp_path: Path) -> None:
    """The first stage reads the row from the store, and so does the first stage of another workflow
    run."""
    found, store = services(tmp_path)
    await instance_catalog.save(store, ROW)
    rows = [
        (await stage(found, "one", first=True)).row,
        (await stage(found, "one")).row,
        (await stage(found, "one", first=True)).row,
        (await stage(found, "two")).row,
    ]

    assert rows == [ROW] * 4
    assert store.read["add-1.json"] == 3


async def test_a_row_that_is_added_later_is_found(tmp_path: Path) -> None:
    """A missing row is not cached."""
    found, store = services(tmp_path)
    missing = (await stage(found, "one", first=True)).row
    await instance_catalog.save(store, ROW)

    assert not isinstance(missing, Instance)
    assert (await stage(found, "one")).instance == ROW


async def test_stages_of_an_attempt_read_its_sandbox_once(tmp_path: Path) -> None:
    """A record that does not exist yet is read again, and another workflow run reads its own."""
    found, store = services(tmp_path)
    await instance_catalog.save(store, ROW)
    job = await stage(found, "one", first=True)
    before = await init_metadata(job)
    record = BootRecord(
        identity="box-1",
        provider="local",
        host="here",
        booted_at=1.0,
        seconds=1.0,
        metadata={"port": 7},
    )
    await job.write(CHECKPOINT, record)
    store.read.clear()
    plays = ("one", "one", "two")
    after = [await init_metadata(await stage(found, play)) for play in plays]

    assert (before, after) == (None, [{"port": 7}] * 3)
    assert store.read[CHECKPOINT] == 2


def test_the_oldest_is_forgotten() -> None:
    """Recently used entries stay."""
    memory = Memory(most=2)
    memory.keep("one", "a", ROW)
    memory.keep("one", "b", ROW)
    memory.recall("one", "a", Instance)
    memory.keep("one", "c", ROW)

    assert [memory.recall("one", key, Instance) for key in "abc"] == [ROW, None, ROW]
    assert memory.recall("one", "a", BootRecord) is None
