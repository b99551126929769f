"""CPython rows: tests and fix come from two commits of a repository."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.instances import base_trees, instance_catalog
from perdure.instances.recipes.dataset_recipe import load_recipe
from perdure.instances.recipes.public_dataset import PublicSet
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_import import import_rows
from perdure.storage.local_store import LocalStore
from perdure.types import Instance, SourceKind
from tests.checkout_paths import ROOT


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))


def git(tree: Path, *arguments: str) -> str:
    argv = ["git", "-C", str(tree), "-c", "user.name=u", "-c", "user.email=u@x", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A repository whose merge fixes a module and adds tests, one of them binary; base and merge."""
    tree = tmp_path_factory.mktemp("cpython")
    (tree / "Lib" / "test" / "data").mkdir(parents=True)
    git(tree, "init", "-q", "-b", "main")
    commits = []
    for word in ("base", "merge"):
        (tree / "Lib" / "calc.py").write_text(f"{word}\n")
        (tree / "Lib" / "test" / "test_calc.py").write_text(f"{word}\n")
        (tree / "Lib" / "test" / "data" / "x.bin").write_bytes(b"\0" + word.encode())
        git(tree, "add", "-A")
        git(tree, "commit", "-q", "-m", word)
        commits.append(git(tree, "rev-parse", "HEAD"))
    return tree, commits[0], commits[1]


def read(clone: tuple[Path, str, str], **changes: Any) -> Instance:
    tree, base, merge = clone
    row = {
        "instance_id": "python__cpython-1",
        "repo": "python/cpython",
        "base_commit": base,
        "merge_commit": merge,
        "problem_statement": "It breaks.",
        "source": {"kind": "git", "url": str(tree)},
    }
    return to_instance({**row, **changes}, "cpython", 2)


def test_tests_are_split_from_the_fix(clone: tuple[Path, str, str]) -> None:
    """`*` also matches `/`; binary files still apply; the model's tests are dropped."""
    instance = read(clone)
    tests, gold = instance.grading.test_patch, instance.gold_patch

    assert b"Lib/test/data/x.bin" in tests
    assert b"GIT binary patch" in tests
    assert b"b/Lib/test/test_calc.py" in tests
    assert gold.count(b"diff --git") == 1
    assert b"b/Lib/calc.py" in gold
    assert instance.grading.patch_exclude == ("Lib/test/*",)


def test_the_suite_is_the_documents(clone: tuple[Path, str, str]) -> None:
    """configure, an address space of 32 GiB, and the dataset's ignored tests."""
    ignored = ["test.test_os.TestScandir.test_attributes", "test.test_perf_profiler.*"]

    assert read(clone).grading.eval_cmd == "./configure && prlimit --as=34359738368 make test"
    assert read(clone, ignore=ignored, address_space=1 << 30).grading.eval_cmd == (
        "./configure && prlimit --as=1073741824 make test TESTOPTS='--ignore "
        "test.test_os.TestScandir.test_attributes --ignore '\"'\"'test.test_perf_profiler.*'\"'\"''"
    )
    assert read(clone, test_cmd="python3 -m test").grading.eval_cmd == "python3 -m test"


def test_globs_are_the_datasets(clone: tuple[Path, str, str]) -> None:
    """`include` selects tests; `exclude` selects paths that a model's diff may not change."""
    instance = read(clone, include=["*test_calc.py"], exclude=["Lib/test/*", "Tools/*"])

    assert instance.grading.test_patch.count(b"diff --git") == 1
    assert instance.grading.patch_exclude == ("Lib/test/*", "Tools/*")
    assert b"x.bin" in instance.gold_patch


def test_without_a_source_the_tree_is_on_github(clone: tuple[Path, str, str]) -> None:
    """The row's diff saves the fetch at import; the build fetches the base."""
    tree, base, merge = clone
    diff = git(tree, "diff", "--binary", "--full-index", base, merge) + "\n"
    instance = read(clone, source=None, diff=diff)

    assert instance.source.model_dump(exclude_none=True) == {
        "kind": SourceKind.GIT,
        "url": "https://github.com/python/cpython",
        "commit": base,
    }
    assert instance.grading.test_patch == read(clone).grading.test_patch


async def test_the_base_is_fetched(clone: tuple[Path, str, str], tmp_path: Path) -> None:
    """A source of kind git gives the files of its commit, without later commits."""
    await base_trees.fetch(read(clone).source, tmp_path / "tree", LocalStore(tmp_path / "store"))

    assert (tmp_path / "tree" / "Lib" / "calc.py").read_text() == "base\n"


async def test_the_public_set_brings_its_ignored_tests(
    clone: tuple[Path, str, str], tmp_path: Path
) -> None:
    """datasets/cpython adds its ignored tests, its globs and its memory limit to a row."""
    tree, base, merge = clone
    row = {
        "instance_id": "python__cpython-1",
        "repo": "python/cpython",
        "base_commit": base,
        "merge_commit": merge,
        "problem_statement": "It breaks.",
        "source": {"kind": "git", "url": str(tree)},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    folder = ROOT / "datasets" / "cpython"
    public = PublicSet(load_recipe(folder), folder, str(tmp_path / "rows.jsonl"))

    store = LocalStore(tmp_path / "store")
    report = await import_rows(store, public)
    instance = await instance_catalog.load(store, report.refs[0])

    assert instance.grading.eval_cmd is not None
    assert instance.grading.eval_cmd.count("--ignore") == 17
    assert instance.grading.patch_exclude == ("Lib/test/*",)
    assert instance.phases.grade.limits.memory_mb == 32768


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"base_commit": ""}, "lacks `base_commit`", "the parent"),
        ({"merge_commit": ""}, "lacks `merge_commit`", "its `diff`"),
        ({"merge_commit": "f" * 40}, "has no commit", "f" * 40),
        ({"include": ["Doc/*"]}, "bad `merge_commit`", "Doc/*"),
        ({"source": {"kind": "directory", "path": "/x"}}, "lacks `diff`", "not a git repository"),
        ({"test_cmd": "x", "ignore": ["y"]}, "`test_cmd` replaces", "remove `ignore`"),
        ({"PASS_TO_PASS": ["t"]}, "it has test lists", "'swe-bench'"),
        ({"address_space": "1G"}, "bad `address_space`", "number of bytes"),
    ],
)
def test_errors(
    clone: tuple[Path, str, str], changes: dict[str, Any], field: str, fix: str
) -> None:
    """Every error names the field and the fix."""
    with pytest.raises(InstanceError) as caught:
        read(clone, data_source="cpython", **changes)

    assert field in str(caught.value)
    assert fix in str(caught.value)
