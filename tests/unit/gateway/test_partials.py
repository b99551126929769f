"""Which tokens of an unfinished turn are kept, and which another process may use."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.engines.pool.salvage import Salvage
from perdure.gateway.journal.partial_stores import LocalPartialStore, RemotePartialStore
from perdure.gateway.journal.partials import (
    CallInputs,
    Line,
    Partials,
    PartialStore,
    TryName,
    call_name,
)
from perdure.storage.local import LocalStore
from perdure.types import EngineSpan, VersionSpan

CALL = call_name("main", "digest")
INPUTS = CallInputs(
    name=TryName("s", CALL, "one"),
    prompt=array("i", [1, 2, 3]),
    sampling={"max_tokens": 9},
    turns=4,
    answered=-1,
)
AGAIN = replace(INPUTS, name=TryName("s", CALL, "two"))


@pytest.fixture(params=["disk", "store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PartialStore:
    """Both kinds; they write as soon as there is something."""
    (tmp_path / "journal" / "s").mkdir(parents=True)
    kind = LocalPartialStore(tmp_path / "journal")
    made: PartialStore = (
        kind if request.param == "disk" else RemotePartialStore(LocalStore(tmp_path / "store"))
    )
    made.every_s = 0.01
    return made


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*partial*") if path.is_file()] + [
        path.name for path in folder.rglob("partial/*")
    ]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def killed(store: PartialStore, folder: Path) -> Salvage:
    """A turn of two engines that a process leaves behind when it is killed; what had been written."""
    partials = Partials(store)
    partial = await partials.begin(INPUTS)
    salvage = partial.salvage
    with partials.kept(partial):
        salvage.begin("vllm a:1", 3, 7)
        salvage.add([10, 11], [-0.1, -0.25], version=7)
        await until(lambda: files(folder))
        salvage.begin("vllm b:1", 5)
        salvage.add([12, 13, 14], [-0.5, -1.0, -2.0], version=None)
        salvage.report([VersionSpan(version=8, start=0, end=1)])
        await partials._write([partial])
    return salvage


async def test_a_turn_is_taken_over_as_it_was(store: PartialStore, tmp_path: Path) -> None:
    """Ids, logprobs, engines with generations, and versions; unknown ones stay unknown."""
    left = await killed(store, tmp_path)
    found = (await Partials(store).begin(AGAIN)).salvage

    assert list(found.ids) == [10, 11, 12, 13, 14]
    assert list(found.logprobs) == [-0.1, -0.25, -0.5, -1.0, -2.0]
    assert found.engines == left.engines
    assert found.engines[0] == EngineSpan(engine="vllm a:1", generation=3, start=0, end=2)
    assert found.versions == [
        VersionSpan(version=7, start=0, end=2),
        VersionSpan(version=8, start=2, end=3),
    ]


@pytest.mark.parametrize(
    "other",
    [
        replace(AGAIN, prompt=array("i", [1, 2, 4])),
        replace(AGAIN, sampling={"max_tokens": 8}),
        replace(AGAIN, name=TryName("s", call_name("other", "digest"), "two")),
        replace(AGAIN, turns=9, answered=4),
        replace(AGAIN, sampling={"max_tokens": 9, "stop": ["x"]}),
    ],
    ids=["prompt", "sampling", "chain", "answered", "stop-strings"],
)
async def test_nothing_of_another_turn_is_used(
    store: PartialStore, tmp_path: Path, other: CallInputs
) -> None:
    """Not of another prompt, other rules, another chain, nor of a turn that the journal has."""
    await killed(store, tmp_path)
    found = (await Partials(store).begin(other)).salvage

    assert list(found.ids) == []


async def test_later_reports_of_versions_replace_earlier_ones(
    store: PartialStore, tmp_path: Path
) -> None:
    """vLLM tells its versions at the end; what was written before that is corrected."""
    partials = Partials(store)
    partial = await partials.begin(INPUTS)
    with partials.kept(partial):
        partial.salvage.begin("vllm a:1", 3, 7)
        partial.salvage.add([10, 11], [-0.1, -0.2], version=None)
        await partials._write([partial])
        partial.salvage.add([12], [-0.3], version=None)
        partial.salvage.report([VersionSpan(version=8, start=0, end=3)])
        await partials._write([partial])
    found = (await Partials(store).begin(AGAIN)).salvage

    assert found.versions == [VersionSpan(version=8, start=0, end=3)]


async def test_tokens_of_weights_in_doubt_are_not_kept(store: PartialStore, tmp_path: Path) -> None:
    """From the announcement of an update until it is proven, nothing is written."""
    partials = Partials(store)
    partial = await partials.begin(INPUTS)
    with partials.kept(partial):
        partial.salvage.begin("vllm a:1", 3, 7)
        partial.salvage.add([10, 11], [-0.1, -0.2], version=7)
        partial.salvage.doubt(coming=8)
        partial.salvage.add([12], [-0.3], version=None)
        await partials._write([partial])
        doubted = list((await Partials(store).begin(AGAIN)).salvage.ids)
        partial.salvage.trust()
        await partials._write([partial])
    proven = list((await Partials(store).begin(AGAIN)).salvage.ids)

    assert (doubted, proven) == ([10, 11], [10, 11, 12])


async def test_dropped_tokens_are_not_taken_over(store: PartialStore, tmp_path: Path) -> None:
    """Written already, then found to be of weights that may not sample it, and sampled anew."""
    partials = Partials(store)
    partial = await partials.begin(INPUTS)
    with partials.kept(partial):
        partial.salvage.begin("vllm a:1", 3, 7)
        partial.salvage.add([10, 11, 12], [-0.1, -0.2, -0.3], version=7)
        await partials._write([partial])
        partial.salvage.cut(1)
        partial.salvage.begin("vllm b:1", 5)
        partial.salvage.add([13, 14, 15], [-0.4, -0.5, -0.6], version=8)
        await partials._write([partial])
        partial.salvage.add([16], [-0.7], version=8)
        await partials._write([partial])
    found = (await Partials(store).begin(AGAIN)).salvage

    assert list(found.ids) == [10, 13, 14, 15, 16]
    assert list(found.logprobs) == [-0.1, -0.4, -0.5, -0.6, -0.7]
    assert [(span.generation, span.end) for span in found.engines] == [(3, 1), (5, 5)]
    assert [(span.version, span.end) for span in found.versions] == [(7, 1), (8, 5)]


@pytest.mark.parametrize("more", [[], [13, 14]])
async def test_a_partial_may_lose_all_its_tokens(
    store: PartialStore, tmp_path: Path, more: list[int]
) -> None:
    """While the call waits for another engine nothing is left of it; then what that one samples."""
    partials = Partials(store)
    partial = await partials.begin(INPUTS)
    with partials.kept(partial):
        partial.salvage.begin("vllm a:1", 3, 7)
        partial.salvage.add([10, 11, 12], [-0.1, -0.2, -0.3], version=7)
        await partials._write([partial])
        partial.salvage.cut()
        await partials._write([partial])
        partial.salvage.begin("vllm b:1", 5)
        partial.salvage.add(more, [-0.4] * len(more), version=8)
        await partials._write([partial])
    found = (await Partials(store).begin(AGAIN)).salvage

    assert list(found.ids) == more


async def test_a_torn_end_of_a_partial_loses_only_its_own_tokens(tmp_path: Path) -> None:
    """A process killed in the middle of a write leaves half a line: the lines before it count."""
    (tmp_path / "s").mkdir()
    store = LocalPartialStore(tmp_path)
    store.every_s = 0.01
    await killed(store, tmp_path)
    (path,) = tmp_path.rglob("partial/*")
    path.write_bytes(path.read_bytes()[:-9])

    assert list((await Partials(store).begin(AGAIN)).salvage.ids) == [10, 11]


async def test_the_longest_partial_is_continued_and_all_are_deleted(
    store: PartialStore, tmp_path: Path
) -> None:
    """A second process that also died left less or more; a final turn leaves nothing behind."""
    await killed(store, tmp_path)
    partials = Partials(store)
    partial = await partials.begin(AGAIN)
    with partials.kept(partial):
        partial.salvage.begin("vllm a:1", 3, 7)
        partial.salvage.add([15], [-0.4], version=7)
        await partials._write([partial])
    third = Partials(store)
    found = await third.begin(replace(INPUTS, name=TryName("s", CALL, "three")))
    third.done("s", CALL)
    await third.aclose()

    assert list(found.salvage.ids) == [10, 11, 12, 13, 14, 15]
    assert [span.end for span in found.salvage.engines] == [2, 5, 6]
    assert files(tmp_path) == []


async def test_a_closed_session_leaves_nothing(store: PartialStore, tmp_path: Path) -> None:
    """Whichever process closes it."""
    await killed(store, tmp_path)
    partials = Partials(store)
    partials.left("s")
    await partials.aclose()

    assert files(tmp_path) == []


async def test_a_short_turn_writes_nothing(tmp_path: Path) -> None:
    """Where a turn takes less than the pause between two writes, keeping it costs nothing."""
    (tmp_path / "s").mkdir()
    partials = Partials(LocalPartialStore(tmp_path))
    partial = await partials.begin(INPUTS)
    with partials.kept(partial):
        partial.salvage.add([10], [-0.1], version=7)
    partials.done("s", CALL)
    await partials.aclose()

    assert files(tmp_path) == []


async def test_a_turn_that_ends_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    """Its last lines may be on their way to the disk at that moment: they are taken away, too."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(LocalPartialStore):
        async def write(self, parts: Mapping[TryName, Sequence[Line]]) -> None:
            begun.set()
            await go_on.wait()
            self._write(parts)

        async def clear(self, session_id: str, call: str | None = None) -> None:
            self._clear(session_id, call)

    (tmp_path / "s").mkdir()
    store = Slow(tmp_path)
    store.every_s = 0.01
    partials = Partials(store)
    partial = await partials.begin(INPUTS)
    with partials.kept(partial):
        partial.salvage.add([10], [-0.1], version=7)
        await begun.wait()
    partials.done("s", CALL)
    for _ in range(9):
        await asyncio.sleep(0)
    go_on.set()
    await until(lambda: partials._writing is None)
    await partials.aclose()

    assert files(tmp_path) == []
