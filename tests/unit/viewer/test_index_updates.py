"""The index follows the store, and a search finds the turn with the words."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from perdure.rollouts.run_pages import finish_run
from perdure.storage.local_store import LocalStore
from perdure.types import RunRequest
from perdure.viewer.index_updates import Readings, run_ids
from perdure.viewer.search_index import VERSION, Filters, Index, match
from tests.store_with_runs import turns, write_rollout

ALL = Filters(run="made")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "i.sqlite")


async def read(store: LocalStore, index: Index) -> None:
    """Read with a new reader, so that no pause applies."""
    assert await Readings(store, index).bring("made", wait=60) == ""


def endings(index: Index) -> list[str]:
    return [row.ending for row in index.rows(ALL, "instance", 0, 100)]


async def test_a_rollout_that_is_replaced_is_read_again(store: LocalStore, index: Index) -> None:
    """The list follows retries, regrades and removals."""
    await write_rollout(store, said=turns(("first attempt", "x")))
    await read(store, index)
    assert endings(index) == ["unresolved"]

    episode = store.root / "runs/made/rollouts/h11-0.14.0/0/episode.json"
    episode.rename(episode.with_name("episode-earlier1.json"))
    await write_rollout(store, resolved=True, said=turns(("second attempt", "x")))
    await read(store, index)

    assert endings(index) == ["resolved"]
    assert index.count(Filters(run="made", q="second attempt")) == 1
    assert index.count(Filters(run="made", q="first attempt")) == 0


async def test_an_open_rollout_becomes_an_ended_one(store: LocalStore, index: Index) -> None:
    """Its files give its stage; its episode gives its outcome."""
    await write_rollout(store, ended=False)
    await read(store, index)
    (row,) = index.rows(ALL, "instance", 0, 9)
    assert (row.stage, row.ending) == ("capture", "")

    await write_rollout(store)
    await read(store, index)
    (row,) = index.rows(ALL, "instance", 0, 9)
    assert (row.stage, row.ending, row.turns) == ("", "unresolved", 6)


async def test_a_manifest_alone_is_enough_for_a_list(store: LocalStore, index: Index) -> None:
    """The rollouts of an ended run are listed before any of their files is read."""
    await write_rollout(store, resolved=True)
    await finish_run(store, RunRequest(run_id="made", dataset="first-steps"))
    for file in (store.root / "runs/made/rollouts").rglob("*"):
        if file.is_file():
            file.unlink()

    readings = Readings(store, index)
    await readings._read_manifest("made")

    (row,) = index.rows(ALL, "instance", 0, 9)
    assert (row.instance, row.ending, row.reward) == ("h11-0.14.0", "resolved", 1.0)


async def test_runs_are_found_without_their_files(store: LocalStore) -> None:
    """A run whose name is a prefix of another run's name is listed separately."""
    for run in ("a", "a-1", "a.1", "a0", "b"):
        await store.put(f"runs/{run}/run.json", b"{}")
        await store.put(f"runs/{run}/rollouts/x/0/attempts/1/sandbox.json", b"{}")

    assert sorted([run async for run in run_ids(store)]) == ["a", "a-1", "a.1", "a0", "b"]


@pytest.mark.parametrize(
    ("q", "found"),
    [
        ("normalized", [2]),
        ("lengths strip", [3]),
        ('"12 passed"', [3]),
        ("test_heade", [0]),
        ("name THIS conversation", [1]),
        ("nowhere", []),
        ('AND OR NOT ( " * ^ :', []),
        ("-- ; '", []),
    ],
)
async def test_search_finds_the_turn(
    store: LocalStore, index: Index, q: str, found: list[int]
) -> None:
    """All words of one turn, whole phrases, the last word as a prefix; any text is a valid query."""
    await write_rollout(store, patch=b"")
    await read(store, index)

    rows = index.rows(Filters(q=q), "instance", 0, 9)

    assert [one.slot for hits in index.snippets(rows, q).values() for one in hits][:1] == found


def test_words_of_a_question() -> None:
    """A user's text is never syntax of the index."""
    assert match('a "b c" d') == '"a" "b c" "d"*'
    assert match('NEAR( "') == '"NEAR("*'
    assert match("-> !") == ""


@pytest.mark.parametrize("kind", ["broken", "of an earlier version", "of a later version"])
async def test_an_index_that_cannot_be_used_is_made_again(
    store: LocalStore, tmp_path: Path, kind: str
) -> None:
    """It is a cache, so no data is lost with it."""
    path = tmp_path / "made.sqlite"
    if kind == "broken":
        path.write_bytes(b"no database" * 1000)
    else:
        version = VERSION + (1 if "later" in kind else -1)
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.executescript(f"CREATE TABLE rollouts (id); PRAGMA user_version = {version};")
    await write_rollout(store)

    index = Index(path)
    await read(store, index)

    assert endings(index) == ["unresolved"]
