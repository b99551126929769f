"""Commits of a clone that change both tests and code become rows."""

import subprocess
from pathlib import Path

import pytest

from perdure.cli.commands.instances import _recipe_of
from perdure.errors import InstanceError
from perdure.instances import base_trees, uv_program
from perdure.instances.recipes import git_history
from perdure.instances.recipes.dataset_build import candidates_of
from perdure.instances.recipes.dataset_recipe import History
from perdure.storage.local_store import LocalStore
from perdure.types import Instance

PROJECT = """
[project]
name = "thing"
requires-python = ">=3.9"
[project.optional-dependencies]
test = ["hypothesis"]
"""
MERGE = """Merge pull request #7 from someone/fix

f counts from two (#7)

It began at one.

Co-authored-by: Some One <one@example.org>
"""


class Clone:
    """A repository in a folder, with commits one minute apart, starting at a given day."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        tree.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, minute: int = 0) -> str:
        when = f"2024-03-05T10:{minute:02}:00+0200"
        names = {"GIT_AUTHOR_NAME": "u", "GIT_AUTHOR_EMAIL": "u@x"}
        names |= {"GIT_COMMITTER_NAME": "u", "GIT_COMMITTER_EMAIL": "u@x"}
        dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "PATH": "/usr/bin:/bin"}
        told = subprocess.run(
            ["git", *words], cwd=self.tree, env={**names, **dates}, check=True, capture_output=True
        )
        return told.stdout.decode().strip()

    def commit(self, message: str, minute: int, **files: str) -> str:
        for name, text in files.items():
            path = self.tree / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message, minute=minute)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    """A base, a code-only change, a test-only change, a merged fix, a fix that removes its test."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    clone = Clone(tmp_path / "thing")
    tests = "from thing import f\n\n\ndef test_f():\n    assert f() == {}\n"
    (clone.tree / "pyproject.toml").write_text(PROJECT)
    (clone.tree / ".gitattributes").write_text("tests export-ignore\n")
    (clone.tree / "tests").mkdir()
    (clone.tree / "tests" / "test_f.py").write_text(tests.format(1))
    (clone.tree / "tests" / "data.txt").write_text("x\n")
    (clone.tree / "thing.py").write_text("def f():\n    return 1\n")
    clone.commit("Begin", 0)
    clone.git("tag", "v1.2")
    clone.commit("Only code", 1, other="1\n")
    (clone.tree / "tests" / "test_more.py").write_text("def test_more():\n    pass\n")
    clone.commit("Only tests", 2)
    clone.git("checkout", "-q", "-b", "fix")
    (clone.tree / "tests" / "test_f.py").write_text(tests.format(2))
    (clone.tree / "thing.py").write_text("def f():\n    return 2\n")
    (clone.tree / "CHANGES.md").write_text("f counts from two\n")
    clone.commit("wip", 3)
    clone.git("checkout", "-q", "main")
    clone.git("merge", "-q", "--no-ff", "fix", "-m", MERGE, minute=4)
    (clone.tree / "tests" / "test_more.py").unlink()
    (clone.tree / "thing.py").write_text("def f():\n    return 2  # two\n")
    clone.commit("Less", 5)
    return clone


async def made(clone: Clone, number: int, **history: object) -> Instance:
    asked = History.model_validate({"repository": str(clone.tree), **history})
    row = git_history.candidates(asked, Path())[number]
    return await row.make("mine", LocalStore(clone.tree.parent / "store"))


async def test_a_merge_becomes_one_row(clone: Clone, tmp_path: Path) -> None:
    """Its parent's files, its tests, its fix without the changelog, its message without trailers."""
    instance = await made(clone, 1)
    store = LocalStore(tmp_path / "store")
    await base_trees.fetch(instance.source, tmp_path / "tree", store)
    for patch in (instance.gold_patch, instance.grading.test_patch):
        subprocess.run(["git", "apply"], cwd=tmp_path / "tree", input=patch, check=True)

    assert instance.problem_statement.endswith(
        "describes:\n\nf counts from two\n\nIt began at one.\n"
    )
    assert instance.grading.test_cmd == "pytest -rA tests/test_f.py"
    assert instance.instance_id == f"thing-{clone.git('rev-parse', 'main^')[:12]}"
    assert (tmp_path / "tree" / "thing.py").read_text() == "def f():\n    return 2\n"
    assert "== 2" in (tmp_path / "tree" / "tests" / "test_f.py").read_text()
    assert (tmp_path / "tree" / "tests" / "data.txt").exists()
    assert b"CHANGES" not in instance.gold_patch


async def test_the_environment_is_that_of_the_commits_day(clone: Clone) -> None:
    """No later package, an accepted interpreter, the tests' extra, the last tag."""
    environment = (await made(clone, 1)).environment

    assert environment.python == "3.11"
    assert environment.install[1] == (
        "uv pip install -q --exclude-newer 2024-03-05T08:04:00Z pytest -e '.[test]'"
    )
    assert environment.env["SETUPTOOLS_SCM_PRETEND_VERSION"] == "1.2"
    own = (await made(clone, 1, requires=["pytest", "attrs"])).environment
    assert own.install[1].endswith("pytest attrs -e .")


async def test_commits_are_the_newest_and_bounded(clone: Clone) -> None:
    """Commits of only code or only tests make no row; `limit` counts the others."""
    asked = History(repository=str(clone.tree))
    rows = git_history.candidates(asked, Path())
    one = git_history.candidates(asked.model_copy(update={"limit": 1}), Path())

    newest = [clone.git("rev-parse", "main"), clone.git("rev-parse", "main^")]
    assert [row.commit.id for row in rows] == newest
    assert [row.commit.id for row in one] == newest[:1]


async def test_a_commit_that_leaves_no_test_is_refused(clone: Clone) -> None:
    """Its test module is removed, so no test could fail before it."""
    with pytest.raises(InstanceError, match="removes the test modules"):
        await made(clone, 0)


@pytest.mark.parametrize("message", ["(#12)", "Signed-off-by: U <u@x>"])
def test_a_commit_without_words_is_refused(message: str) -> None:
    """The agent needs a task description."""
    with pytest.raises(InstanceError, match="does not describe the change"):
        git_history.statement("thing", message)


async def test_releases_become_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One commit per release, with the index's time and the changelog entry, made once."""
    import datetime

    asked: list[str] = []

    def download(requirement: str) -> base_trees.Downloaded:
        asked.append(requirement)
        version = requirement.partition("==")[2]
        tree = tmp_path / version / "thing-x"
        (tree / "tests").mkdir(parents=True)
        (tree / "thing.py").write_text(version)
        (tree / "tests" / "test_f.py").write_text(version)
        (tree / "CHANGES.md").write_text(f"# {version}\n\nNow {version}.\n")
        return base_trees.Downloaded(
            base_trees.pack(tree.parent), datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC)
        )

    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(base_trees, "download_sdist", download)
    history = History(package="thing", versions=("1.0", "1.1"))
    first = git_history.candidates(history, Path())
    again = git_history.candidates(history, Path())

    row = await first[0].make("mine", LocalStore(tmp_path / "store"))
    assert asked == ["thing==1.0", "thing==1.1"]
    assert [row.facts for row in first] == [row.facts for row in again]
    assert len(first) == 1
    assert row.problem_statement.endswith("thing 1.1\n\nNow 1.1.\n")
    assert "--exclude-newer 2024-01-02T03:00:00Z" in row.environment.install[1]


def test_the_index_says_when_a_release_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """uv's lock has each file's upload time."""
    lock = b"""
[[packages]]
name = "thing"
sdist = { url = "https://x/t.tar.gz", upload-time = 2024-01-02T03:04:05Z, hashes = { sha256 = "a" } }
"""
    monkeypatch.setattr(uv_program, "_compile", lambda *_: lock)
    uploaded = uv_program.locate_sdist("thing==1").uploaded

    assert uploaded is not None
    assert uploaded.isoformat() == "2024-01-02T03:04:05+00:00"


def test_a_clone_needs_no_recipe(clone: Clone) -> None:
    """`perdure instances build CLONE` makes a dataset with the folder's name."""
    recipe, folder = _recipe_of(str(clone.tree), limit=1)
    rows = candidates_of(recipe, folder)

    assert recipe.name == "thing"
    assert [row.instance_id for row in rows] == [f"thing-{clone.git('rev-parse', 'main')[:12]}"]
