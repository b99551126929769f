"""A dataset.toml says where rows come from, and sets their defaults."""

import json
from pathlib import Path

import pytest

from perdure import variant_registry
from perdure.errors import ConfigurationError, InstanceError
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.calibration_proof import CalibrationReport
from perdure.instances.recipes.dataset_build import _record, candidates_of
from perdure.instances.recipes.dataset_recipe import FROM_ROW, Recipe, load_recipe
from perdure.instances.recipes.public_dataset import PublicSet
from perdure.instances.rows.image_rules import rule_named
from perdure.instances.rows.row_conversion import to_instance
from perdure.storage.local_store import LocalStore
from perdure.types import CalibrationState, Grading, Instance, Phases, Source, SourceKind
from tests.checkout_paths import ROOT

RECIPES = sorted(file.parent for file in (ROOT / "datasets").glob("*/dataset.toml"))

RECIPE = Recipe.model_validate(
    {
        "name": "cpython",
        "rows": {"hub": "owner/rows", "format": "cpython"},
        "timeout_s": 3600,
        "patch": {"exclude": ["Lib/test/*"]},
        "phases": {"grade": {"limits": {"memory_mb": 32_768}}},
    }
)


def instance(grading: Grading, phases: Phases | None = None) -> Instance:
    return Instance(
        instance_id="x-1",
        dataset="cpython",
        problem_statement="-",
        source=Source(kind=SourceKind.IMAGE),
        grading=grading,
        phases=phases or Phases(),
    )


def test_a_row_that_says_nothing_gets_the_datasets_defaults() -> None:
    """Time limit, sandbox limits and the globs of graded paths."""
    found = RECIPE.apply_defaults(instance(Grading()))

    assert found.grading.timeout_s == 3600
    assert found.grading.patch_exclude == ("Lib/test/*",)
    assert found.phases.grade.limits.memory_mb == 32_768


def test_what_a_row_says_itself_is_kept() -> None:
    """A dataset's defaults replace no value of a row."""
    own = Phases.model_validate({"grade": {"limits": {"memory_mb": 100}}})
    grading = Grading(timeout_s=60.0, patch_include=("src/*",))

    found = RECIPE.apply_defaults(instance(grading, own))

    assert (found.grading, found.phases) == (grading, own)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ('[rows]\nformat = "swebench"', "give exactly one of 'hub' and 'files'"),
        ('[rows]\nhub = "no-slash"\nformat = "swebench"', "`rows.hub`"),
        ('[rows]\nhub = "a/b"\nformat = "x"\nrevision = "main"', "`rows.revision"),
        ('[rows]\nhub = "a/b"\nformat = "x"\nimmage = "row"', "`rows.immage`"),
        ("", r"give exactly one of \[rows\], \[\[pair\]\], \[\[releases\]\]"),
        ("[[history]]\nlimit = 3", "give exactly one of 'repository' and 'package'"),
        ('[[history]]\npackage = "x"\nversions = ["1"]', "needs two or more 'versions'"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, rows: str, complaint: str) -> None:
    """The error has the file, the entry and the field in one line."""
    (tmp_path / "dataset.toml").write_text(f'name = "x"\n{rows}\n')

    with pytest.raises(ConfigurationError, match=complaint):
        load_recipe(tmp_path)


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_a_shipped_recipe_is_named_like_its_folder(folder: Path) -> None:
    """`perdure run NAME` finds the folder by its name."""
    assert load_recipe(folder).name == folder.name


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_a_shipped_recipe_names_what_exists(folder: Path) -> None:
    """Its format, image rule and grader exist in the code."""
    rows = load_recipe(folder).rows
    if rows is None:
        return

    assert variant_registry.data_source_named(rows.format) is not None
    assert set(rows.graders) <= set(variant_registry.GRADERS)
    assert rows.image == FROM_ROW or callable(rule_named(rows.image))


def published(tmp_path: Path, *rows: dict[str, object], **fields: object) -> PublicSet:
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    given = {"files": ["rows.json"], "format": "swebench", **fields}
    return PublicSet(Recipe.model_validate({"name": "mine", "rows": given}), tmp_path)


ROW: dict[str, object] = {
    "instance_id": "owner__repo-1",
    "problem_statement": "-",
    "patch": "diff --git a/x b/x\n",
    "test_patch": "diff --git a/y b/y\n",
    "test_cmd": "pytest -rA",
    "FAIL_TO_PASS": ["y::t"],
}


def test_a_row_without_an_image_gets_the_one_of_its_datasets_rule(tmp_path: Path) -> None:
    """The recipe gives the rule and the format; a row's own image wins."""
    source = published(
        tmp_path, ROW, {**ROW, "image": "own:1"}, image="swe-bench", defaults={"python": "3.9"}
    )

    first, second = (to_instance(row.fields, "mine", row.number) for row in source.read())

    assert first.environment.image is not None
    assert first.environment.image.endswith("owner_1776_repo-1:latest")
    assert first.environment.python == "3.9"
    assert (first.data_source, second.environment.image) == ("swebench", "own:1")


def test_a_row_that_another_grader_would_grade_is_refused(tmp_path: Path) -> None:
    """The recipe promises a protocol for all rows; one of the two is wrong."""
    source = published(tmp_path, {**ROW, "eval_cmd": "true", "image": "x"})
    (row,) = source.read()

    with pytest.raises(InstanceError, match=r"select the grader 'eval_cmd'.*only swebench"):
        source.finished(to_instance(row.fields, "mine", 1))


async def test_a_built_row_is_a_calibrated_one(tmp_path: Path) -> None:
    """Its lists come from the same kind of runs, so runs of the dataset do not mark it."""
    row = instance(Grading(fail_to_pass=("a",), pass_to_pass=("b",)))
    record = _record(row, CalibrationReport(3, 1, 1), "bubblewrap")
    store = LocalStore(tmp_path)
    await instance_catalog.save(store, row)
    await calibration_record.save(store, record)

    marks = await calibration_record.marks(store, [row.ref], "bubblewrap")

    assert marks[row.ref].state is CalibrationState.PROVED
    grading = calibration_record.joined(row, record).grading
    assert grading == row.grading.model_copy(update={"timeout_s": grading.timeout_s})


def test_releases_are_pairs_of_each_package_in_turn() -> None:
    """A build that is cut short has rows of many packages."""
    releases = [
        {"package": "a", "versions": ["1", "2", "4"]},
        {"package": "b", "versions": ["7", "8"], "requires": ["pytest", "pretend"]},
    ]
    recipe = Recipe.model_validate({"name": "x", "releases": releases})

    found = candidates_of(recipe, Path())
    assert [one.instance_id for one in found] == ["a-2", "b-8", "a-4"]
    assert ["pretend" in one.facts for one in found] == [False, True, False]
