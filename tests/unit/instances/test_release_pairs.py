"""Two releases make one instance, from the facts in a recipe."""

import re
import subprocess
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, InstanceError
from perdure.instances import base_trees
from perdure.instances.recipes import changelog, release_pairs
from perdure.instances.recipes.dataset_recipe import Pair, load_recipe
from tests.checkout_paths import ROOT

RECIPE = ROOT / "datasets" / "first-steps"
PAIR = Pair.model_validate(
    {
        "package": "thing",
        "from": "1.0",
        "to": "1.1",
        "test_cmd": "pytest -rA tests/test_a.py",
        "exclude_newer": "2024-01-01",
    }
)
BEFORE = {
    "thing/__init__.py": b"__version__ = '1.0'\n",
    "thing/_version.py": b"version = '1.0'\n",
    "thing/core.py": b"def f():\r\n    return 1\r\n",
    "thing/gone.py": b"x = 1\n",
    "tests/test_a.py": b"def test_a():\n    assert True\n",
    "PKG-INFO": b"Version: 1.0\n",
    "docs/index.md": b"old\n",
    "tests/__pycache__/test_a.cpython-39.pyc": b"\x00old",
    "thing/old.pyc": b"\x00old",
}
AFTER = {
    "thing/__init__.py": b"__version__ = '1.1'\n",
    "thing/_version.py": b"__version__ = version = '1.1'\n",
    "thing/core.py": b"def f():\r\n    return 2\r\n",
    "thing/icon.bin": b"\x00\xff\x01",
    "tests/test_a.py": b"from thing.core import f\n\n\ndef test_a():\n    assert f() == 2\n",
    "tests/data.bin": b"\x00\x01",
    "PKG-INFO": b"Version: 1.1\n",
    "docs/index.md": b"new\n",
    "tests/__pycache__/test_a.cpython-39.pyc": b"\x00new",
    "tests/__pycache__/test_b.cpython-39.pyc": b"\x00new",
    "thing/old.pyc": b"\x00new",
    "CHANGES.md": b"# Changes\n\n## 1.1\n\n- `f` returns 2.\n\n## 1.0\n\n- First.\n",
}


def sdist(folder: Path, files: dict[str, bytes]) -> bytes:
    for name, data in files.items():
        path = folder / "thing-x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return base_trees.pack(folder)


@pytest.fixture
def made(tmp_path: Path) -> release_pairs.Difference:
    return release_pairs.difference(
        PAIR, sdist(tmp_path / "1", BEFORE), sdist(tmp_path / "2", AFTER)
    )


def test_gold_and_tests_turn_one_release_into_the_next(
    made: release_pairs.Difference, tmp_path: Path
) -> None:
    """Applied to the base, both patches give exactly the later release's code and tests."""
    tree = tmp_path / "tree"
    base_trees.unpack(made.base, tree)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    for patch in (made.gold, made.tests):
        subprocess.run(["git", "apply"], cwd=tree, input=patch, check=True)
    changed = ["thing/core.py", "thing/icon.bin", "tests/test_a.py", "tests/data.bin"]

    assert {name: (tree / name).read_bytes() for name in changed} == {n: AFTER[n] for n in changed}
    assert not (tree / "thing/gone.py").exists()


def test_what_only_a_release_changes_is_left_out(made: release_pairs.Difference) -> None:
    """Version bumps, packaging, documentation, the changelog and interpreter caches are neither
    gold nor tests. An environment's base has no caches, so a patch of them would not apply."""
    touched = re.findall(rb"^diff --git a/(\S+)", made.gold + made.tests, re.MULTILINE)

    assert sorted(touched) == [
        b"tests/data.bin",
        b"tests/test_a.py",
        b"thing/core.py",
        b"thing/gone.py",
        b"thing/icon.bin",
    ]


def test_statement_is_the_changelog_entry(made: release_pairs.Difference) -> None:
    """The task is the later release's changelog entry, and no other version's."""
    assert "- `f` returns 2." in made.statement
    assert "First" not in made.statement


def test_statement_without_a_changelog_names_the_files(tmp_path: Path) -> None:
    """For a release without an entry, the task lists the files that it changed."""
    after = {name: data for name, data in AFTER.items() if name != "CHANGES.md"}
    made = release_pairs.difference(
        PAIR, sdist(tmp_path / "1", BEFORE), sdist(tmp_path / "2", after)
    )

    assert "no changelog entry" in made.statement
    assert "- thing/core.py" in made.statement


@pytest.mark.parametrize(
    ("kept", "complaint"), [("thing", "changes no tests"), ("tests", "changes no code")]
)
def test_release_without_code_or_tests_is_refused(
    tmp_path: Path, kept: str, complaint: str
) -> None:
    """The error for a pair that cannot be graded names what is missing."""
    after = {**BEFORE, **{name: data for name, data in AFTER.items() if name.startswith(kept)}}

    with pytest.raises(InstanceError, match=rf"thing 1\.0 -> 1\.1 {complaint}"):
        release_pairs.difference(PAIR, sdist(tmp_path / "1", BEFORE), sdist(tmp_path / "2", after))


def test_base_archive_is_the_same_every_time(tmp_path: Path) -> None:
    """Equal trees pack to equal bytes, so they are one blob in the store."""
    assert sdist(tmp_path / "1", BEFORE) == sdist(tmp_path / "2", BEFORE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# 1.10\n\nno\n\n## [1.1] - 2024-01-01\n\nyes\n\n## 1.0\n\nno", "yes"),
        (
            "1.1 (unreleased)\n===\n\nyes\n\nFixed\n---\n\nthis\n\n1.0\n===\nno",
            "yes\n\nFixed\n---\n\nthis",
        ),
        ("`Next <x/1.1...HEAD>`__\n---\n\n`v1.1 <x/1.0...1.1>`__\n---\n\nyes\n", "yes"),
        ("Version 1.1\n\n- yes\n\nVersion 1.0\n\n- no", "- yes"),
        ("1.1.1\n-----\n\nno\n", ""),
    ],
    ids=["markdown", "rst with parts", "links", "plain", "longer version"],
)
def test_changelog_section(text: str, expected: str) -> None:
    """A version's entry ends where the next version starts, in every usual style."""
    assert changelog.section(text, "1.1") == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('name = "x"\npair = []', "exactly one of"),
        ('name = "x"\n[[pair]]\npackage = "a"', r"`pair\[0\]\.from`: Field required"),
        ('name = "x"\nnam = 1\n[[pair]]', "`pair"),
        ("name = ", "not valid TOML"),
    ],
)
def test_recipe_error_names_the_field(tmp_path: Path, text: str, complaint: str) -> None:
    """The error has the file, the entry and the field in one line."""
    (tmp_path / "dataset.toml").write_text(text)

    with pytest.raises(ConfigurationError, match=complaint):
        load_recipe(tmp_path)


def test_first_steps_is_enough_to_start() -> None:
    """The shipped recipe has at least eight pairs of six packages, three for the demo."""
    recipe = load_recipe(RECIPE)

    assert len(recipe.pairs) >= 8
    assert len({pair.package for pair in recipe.pairs}) >= 6
    assert sum(pair.demo for pair in recipe.pairs) == 3
