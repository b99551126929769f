"""Fetched commits are cached in the home; a killed process leaves no files elsewhere."""

import fcntl
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.instances import git_source, host_git


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    return tmp_path / "home"


@pytest.fixture
def origin(tmp_path: Path) -> tuple[str, str]:
    """A repository with one commit: its URL and the commit."""
    tree = tmp_path / "origin"
    tree.mkdir()
    (tree / "a").write_text("one\n")
    return tree.as_uri(), host_git.commit_all(tree)


def cache(home: Path) -> Path:
    (folder,) = (path for path in (home / "git").iterdir() if path.is_dir())
    return folder


def test_commits_are_kept_in_the_home(
    home: Path, origin: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One private folder per URL, none in the system's temporary folder; a commit is fetched once."""
    git_source.export(*origin, tmp_path / "first")
    monkeypatch.setattr(git_source, "_fetch", lambda *_: pytest.fail("fetched twice"))
    git_source.export(*origin, tmp_path / "second")

    assert (tmp_path / "second" / "a").read_text() == "one\n"
    assert list((tmp_path / "temp").iterdir()) == []
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home / "git", cache(home))] == [
        0o700
    ] * 2


def test_one_process_at_a_time_fetches_into_a_folder(
    home: Path, origin: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While git runs, it holds the folder's lock too, in case our process is killed."""
    taken: list[str] = []
    real: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run

    def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        if "init" in argv or "fetch" in argv:
            (lock,) = (home / "git").glob("*.lock")
            with lock.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert options["pass_fds"]
            taken.append(next(word for word in argv if word in ("init", "fetch")))
        return real(argv, **options)

    monkeypatch.setattr(subprocess, "run", run)
    git_source.export(*origin, tmp_path / "tree")

    assert taken == ["init", "fetch"]


def test_a_killed_fetch_does_not_block_the_next(
    home: Path, origin: tuple[str, str], tmp_path: Path
) -> None:
    """git refuses to fetch while its own lock file exists, which a killed git leaves behind."""
    url, first = origin
    git_source.export(url, first, tmp_path / "first")
    (cache(home) / ".git" / "shallow.lock").touch()
    tree = Path(url.removeprefix("file://"))
    (tree / "a").write_text("two\n")
    second = host_git.commit_all(tree)

    git_source.export(url, second, tmp_path / "second")

    assert (tmp_path / "second" / "a").read_text() == "two\n"


def test_a_clone_on_this_host_is_not_copied(
    home: Path, origin: tuple[str, str], tmp_path: Path
) -> None:
    """Its commits are read in place."""
    url, commit = origin
    git_source.export(url.removeprefix("file://"), commit, tmp_path / "tree")
    told = host_git.git(cache(home), "count-objects", "-v").decode().split()

    assert (tmp_path / "tree" / "a").read_text() == "one\n"
    assert (told[1], told[told.index("in-pack:") + 1]) == ("0", "0")


def test_a_lock_is_its_users_alone(tmp_path: Path) -> None:
    """Another user who could open the lock could hold it for ever."""
    umask = os.umask(0o022)
    try:
        with git_source.locked(tmp_path / "git" / "repository"):
            pass
    finally:
        os.umask(umask)

    assert stat.S_IMODE((tmp_path / "git" / "repository.lock").stat().st_mode) == 0o600
