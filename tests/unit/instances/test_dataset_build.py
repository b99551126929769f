"""An interrupted build resumes."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from perdure.cli.commands.instances import _otherwise
from perdure.errors import ConfigurationError, InstanceError, RetryHere
from perdure.instances.calibration_proof import Calibrated, CalibrationReport, MakeSandbox
from perdure.instances.recipes.dataset_build import Builder, Built, build_all, chosen
from perdure.instances.recipes.dataset_recipe import Pair, Recipe
from perdure.instances.recipes.recipe_candidate import rejected
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.local_store import LocalStore
from perdure.types import Instance, Source, SourceKind


@dataclass
class Entry:
    """A candidate that counts how often it was made."""

    instance_id: str
    tree: Path
    facts: str = "1"
    problem: Exception | None = None
    made: list[str] = field(default_factory=list)

    async def make(self, dataset: str, store: Store) -> Instance:
        self.made.append(self.instance_id)
        if self.problem is not None:
            raise self.problem
        source = Source(kind=SourceKind.DIRECTORY, path=str(self.tree))
        return Instance(
            instance_id=self.instance_id, dataset=dataset, problem_statement="-", source=source
        )


async def calibrate(instance: Instance, make: MakeSandbox) -> Calibrated:
    return Calibrated(instance, CalibrationReport(1, 1, 2))


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    (tmp_path / "tree").mkdir()
    settings = Settings(home=tmp_path / "home", sandbox={"allow_local": True})
    store = LocalStore(tmp_path / "store")
    recipe = Recipe(name="mine", pairs=(Pair(package="x", before="1", after="2"),), timeout_s=60)
    return Builder(tmp_path / "home", store, LocalProvider(settings), recipe, calibrate)


async def test_what_is_done_is_not_done_again(builder: Builder, tmp_path: Path) -> None:
    """A built row is kept and a bad entry's problem repeated; new facts make both be tried again."""
    good = Entry("good", tmp_path / "tree")
    bad = Entry("bad", tmp_path / "tree", problem=InstanceError("no tests"))
    for _ in range(2):
        built = [one async for one in build_all(builder, [good, bad])]
    told = {one.instance_id: (one.instance is not None, one.problem) for one in built}

    assert told == {"good": (True, ""), "bad": (False, "no tests")}
    assert (good.made, bad.made) == (["good"], ["bad"])

    bad.facts = good.facts = "2"
    assert [one async for one in build_all(builder, [good, bad])]
    assert (len(good.made), len(bad.made)) == (2, 2)


async def test_a_built_row_is_no_longer_told_as_bad(builder: Builder, tmp_path: Path) -> None:
    """If a rejected entry makes a row (`--rebuild`), the old problem is deleted."""
    entry = Entry("late", tmp_path / "tree", problem=InstanceError("no tests"))
    assert [one.problem async for one in build_all(builder, [entry])] == ["no tests"]
    entry.problem = None

    assert [one.problem async for one in build_all(builder, [entry], rebuild=True)] == [""]
    assert await rejected(builder.store, "mine/late") is None


async def test_what_was_out_of_reach_is_tried_again(builder: Builder, tmp_path: Path) -> None:
    """If the index is unreachable for one entry, the others are built, and the next build retries."""
    away = Entry("away", tmp_path / "tree", problem=RetryHere("the index is away"))
    good = Entry("good", tmp_path / "tree")
    for _ in range(2):
        built = [one async for one in build_all(builder, [away, good], jobs=1)]

    assert sorted(one.problem for one in built) == ["", "the index is away"]
    assert (len(away.made), len(good.made)) == (2, 1)


async def test_a_built_row_has_the_limits_of_its_recipe(builder: Builder, tmp_path: Path) -> None:
    """They also hold for published rows; a row that sets its own keeps it."""
    built = await builder.build(Entry("good", tmp_path / "tree"), rebuild=False)

    assert built.instance is not None
    assert built.instance.grading.timeout_s == 60


def test_entries_are_chosen_and_bounded(tmp_path: Path) -> None:
    """Globs and a limit select entries; a glob without a match is refused with the entries."""
    entries = [Entry(name, tmp_path) for name in ("a-1", "a-2", "b-1")]

    assert [one.instance_id for one in chosen(entries, ["a-*", "b-*"], 2)] == ["a-1", "a-2"]
    with pytest.raises(ConfigurationError, match="matches no entry of the recipe: a-1, a-2, b-1"):
        chosen(entries, ["c-*"])


def test_a_build_that_counts_other_tests_says_so() -> None:
    """The recipe's author had another result: an interpreter or a package differs."""
    built = Built("x-1", 1.0, report=CalibrationReport(3, 1, 7))

    assert _otherwise(built, {"x-1": (1, 8)}) == "; the recipe counts 1 to fix, 8 to keep"
    assert _otherwise(built, {"x-1": (1, 7)}) == _otherwise(built, {}) == ""
