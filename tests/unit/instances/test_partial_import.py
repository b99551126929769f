"""A run imports only the rows that it uses; other commands import the rest of a dataset."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from perdure.cli.main import cli
from perdure.cli.runs import instance_selection
from perdure.cli.runs.instance_selection import resolve
from perdure.errors import ConfigurationError, RetryHere
from perdure.instances import calibration_record, git_source, instance_catalog
from perdure.instances.calibration_record import Calibration
from perdure.instances.rows.row_choice import Choice
from perdure.storage.local_store import LocalStore
from perdure.types import CalibrationState

AWAY = "http://127.0.0.1:1/cpython"
"""Nothing listens on port 1: git says so at once."""
ROWS = 12
RECIPE = """
name = "suite"
description = "Rows that name commits."
[rows]
files = ["rows.jsonl"]
format = "cpython"
image = "row"
graders = ["eval_cmd"]
"""


def git(tree: Path, *arguments: str) -> str:
    argv = ["git", "-C", str(tree), "-c", "user.name=u", "-c", "user.email=u@x", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A repository in which each commit changes a module and its test: its URL and its commits."""
    tree = tmp_path_factory.mktemp("origin")
    (tree / "Lib" / "test").mkdir(parents=True)
    git(tree, "init", "-q", "-b", "main")
    commits = []
    for number in range(ROWS + 1):
        for name in ("calc.py", "test/test_calc.py"):
            (tree / "Lib" / name).write_text(f"{number}\n")
        git(tree, "add", "-A")
        git(tree, "commit", "-q", "-m", str(number))
        commits.append(git(tree, "rev-parse", "HEAD"))
    return tree.as_uri(), commits


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERDURE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    return LocalStore(tmp_path / "store")


def written(path: Path, origin: tuple[str, list[str]], away: tuple[int, ...] = ()) -> str:
    """A file of rows `c-00` to `c-11` in reverse order; those in `away` cannot be fetched."""
    url, commits = origin
    rows: list[dict[str, Any]] = [
        {
            "instance_id": f"c-{number:02}",
            "repo": "python/cpython",
            "base_commit": commits[number],
            "merge_commit": commits[number + 1],
            "problem_statement": "It breaks.",
            "source": {"kind": "git", "url": AWAY if number in away else url},
        }
        for number in reversed(range(ROWS))
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def public(tmp_path: Path, origin: tuple[str, list[str]], away: tuple[int, ...] = ()) -> str:
    """The name of a recipe for such a file."""
    written(tmp_path / "suite" / "rows.jsonl", origin, away)
    (tmp_path / "suite" / "dataset.toml").write_text(RECIPE)
    return "suite"


async def test_only_the_rows_of_the_run_are_fetched(
    store: LocalStore, tmp_path: Path, origin: tuple[str, list[str]]
) -> None:
    """`-l 1` and `-i ID` of a file convert one row; the others may be unreachable."""
    path = written(tmp_path / "rows.jsonl", origin, away=(0, 5))

    first = await resolve(store, path, Choice(limit=1))
    named = await resolve(store, path, Choice(include=("c-03",)))

    assert first.refs == ("rows/c-11",)
    assert named.refs == ("rows/c-03",)
    assert await instance_catalog.refs(store, "rows") == ["rows/c-03", "rows/c-11"]


async def test_a_public_set_is_completed_as_commands_ask_for_more(
    store: LocalStore,
    tmp_path: Path,
    origin: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit counts by id, as a run of the whole set does; imported rows are kept."""
    name = public(tmp_path, origin)

    await resolve(store, name, Choice(limit=1))
    assert await instance_catalog.refs(store, name) == ["suite/c-00"]

    converted: list[str] = []
    real = instance_catalog.save

    async def save(store: Any, instance: Any) -> None:
        converted.append(instance.instance_id)
        await real(store, instance)

    monkeypatch.setattr(instance_catalog, "save", save)
    await resolve(store, name, Choice(limit=3))
    assert sorted(converted) == ["c-01", "c-02"]

    await resolve(store, name)
    assert len(converted) == ROWS - 1
    (
        tmp_path / "suite" / "rows.jsonl"
    ).unlink()  # all rows are imported, so the file is not read again
    await resolve(store, name)


async def test_a_quarantined_row_does_not_shorten_a_limited_run(
    store: LocalStore, tmp_path: Path, origin: tuple[str, list[str]]
) -> None:
    """Runs omit quarantined rows, so one more row is imported for each."""
    name = public(tmp_path, origin)
    await resolve(store, name, Choice(limit=1))
    record = Calibration(
        instance="suite/c-00",
        instance_sha256=calibration_record.digest_of(
            await instance_catalog.load(store, "suite/c-00")
        ),
        sandbox="bubblewrap",
        state=CalibrationState.QUARANTINED,
        runs=3,
    )
    await calibration_record.save(store, record)

    await resolve(store, name, Choice(limit=1))

    assert await instance_catalog.refs(store, name) == ["suite/c-00", "suite/c-01"]


def test_a_network_error_names_the_row_and_keeps_the_others(
    store: LocalStore, tmp_path: Path, origin: tuple[str, list[str]]
) -> None:
    """Imported rows stay, the list marks the dataset, and the same command resumes."""
    name = public(tmp_path, origin, away=(4,))

    with pytest.raises(RetryHere, match=rf"row 8 \(c-04\): cannot reach {AWAY}"):
        asyncio.run(resolve(store, name))
    listed = CliRunner().invoke(cli, ["instances", "list"])
    one = CliRunner().invoke(cli, ["instances", "list", name, "--json"])
    here = len(asyncio.run(instance_catalog.refs(store, name)))

    assert 0 < here < ROWS
    assert f"suite ({here} of {ROWS} rows; the others are imported when a command needs" in (
        listed.output
    )
    assert json.loads(one.stdout)["rows_left"] == ROWS - here

    public(tmp_path, origin)
    asyncio.run(resolve(store, name))
    assert "suite (12)\n" in CliRunner().invoke(cli, ["instances", "list"]).output


async def test_commits_of_many_rows_come_in_few_fetches(
    store: LocalStore,
    tmp_path: Path,
    origin: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are read concurrently, and rows that wait for one repository share a fetch."""
    fetches: list[int] = []
    real = git_source._fetch

    def fetch(folder: Path, url: str, commits: list[str], lock: int) -> None:
        fetches.append(len(commits))
        real(folder, url, commits, lock)

    monkeypatch.setattr(git_source, "_fetch", fetch)
    path = written(tmp_path / "rows.jsonl", origin)

    found = await resolve(store, path)

    assert found.refs is not None
    assert len(found.refs) == ROWS
    assert sum(fetches) == ROWS + 1
    assert len(fetches) <= ROWS / 2


async def test_no_row_that_was_asked_for(
    store: LocalStore, tmp_path: Path, origin: tuple[str, list[str]]
) -> None:
    """A glob without a match is refused with the number of rows, and fetches none."""
    path = written(tmp_path / "rows.jsonl", origin)

    with pytest.raises(ConfigurationError, match=rf"select none of {ROWS} instances .*c-11"):
        await resolve(store, path, Choice(include=("d-*",)))
    assert await instance_catalog.refs(store, "rows") == []
    assert issubclass(instance_selection.NoRowsSelected, ConfigurationError)
