"""Fetches single commits of a git repository without their history, and caches them in the home."""

import fcntl
import hashlib
import io
import os
import shutil
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from perdure.durable_files import is_whole, publish_folder
from perdure.errors import Boundary, InstanceError, RetryHere
from perdure.instances import host_git
from perdure.settings.settings_loader import load_settings

ATTRIBUTES = "* -export-ignore -export-subst\n"
"""Keeps files in the tree that the project excludes from archives."""
_WAITING: defaultdict[Path, list[tuple[str, ...]]] = defaultdict(list)
"""Commits that threads of this process wait for, by repository. The next fetch gets all of them."""
_AWAY = ("Could not resolve host", "Connection", "timed out", "unable to access")


def export(url: str, commit: str, tree: Path) -> None:
    """Write the files of a commit below `tree`. Raises: InstanceError, RetryHere."""
    packed = host_git.git(_with(url, commit), "archive", "--format=tar", commit)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        # Python 3.11.2, which is Debian 12's, knows no filters; git archives no path outside its tree.
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)
        tar.extractall(tree)


def changed_paths(url: str, before: str, after: str) -> list[str]:
    """Paths that differ between two commits. Raises: InstanceError, RetryHere."""
    folder = _with(url, before, after)
    names = host_git.git(folder, "diff", "--name-only", "--no-renames", "-z", before, after)
    return [name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name]


def list_existing_paths(url: str, commit: str, paths: list[str]) -> list[str]:
    """The given paths that exist in a commit. Raises: InstanceError, RetryHere."""
    words = ("ls-tree", "-r", "--name-only", "-z", commit, "--", *paths)
    names = host_git.git(_with(url, commit), *words) if paths else b""
    return [name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name]


def difference(url: str, before: str, after: str, paths: list[str]) -> bytes:
    """The binary-safe diff of these paths between two commits."""
    if not paths:
        return b""
    options = ["--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv"]
    return host_git.git(_with(url, before, after), "diff", *options, before, after, "--", *paths)


def _with(url: str, *commits: str) -> Path:
    """A repository that has these commits."""
    folder = cache() / hashlib.sha256(url.encode()).hexdigest()[:16]
    if not all(_has(folder, commit) for commit in commits):
        waits = _WAITING[folder]
        waits.append(commits)
        try:
            with locked(folder) as lock:
                if missing := _missing(folder, commits):  # another thread may have fetched them
                    _prepare(folder, url, lock)
                    _fetch_all(folder, url, missing, lock)
        finally:
            waits.remove(commits)
    os.utime(folder)  # cleanup by age reads the time of the last use
    return folder


def cache() -> Path:
    """The folder of the home that holds a repository and a lock for each URL."""
    return load_settings().home.absolute() / "git"


def create_repository_once(name: str, make: Callable[[Path], None]) -> Path:
    """The repository `name` of the cache, which `make` fills if it is absent. It gets its name once
    it is complete, so a killed process never leaves half of one there."""
    folder = cache() / name
    if not is_whole(folder):
        with locked(folder):
            for left in folder.parent.glob(f"{name}.draft-*"):
                shutil.rmtree(left)
            if not is_whole(folder):
                draft = folder.with_name(f"{name}.draft-{uuid4().hex[:8]}")
                draft.mkdir(mode=0o700)
                make(draft)
                publish_folder(draft, folder)
    os.utime(folder)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a folder of the cache. The kernel frees the lock of a dead process."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _prepare(folder: Path, url: str, lock: int) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    host_git.git(folder, "init", "-q", "--template=", keep_open=(lock,))
    info = folder / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text(ATTRIBUTES)
    _clear(folder)
    _add_alternate(folder, url)


def _missing(folder: Path, commits: Iterable[str]) -> list[str]:
    return [commit for commit in dict.fromkeys(commits) if not _has(folder, commit)]


def _fetch_all(folder: Path, url: str, missing: list[str], lock: int) -> None:
    """Fetch these commits, and in the same call those that other threads wait for."""
    others = [commit for commits in list(_WAITING[folder]) for commit in commits]
    together = _missing(folder, [*missing, *others])
    try:
        _fetch(folder, url, together, lock)
    except InstanceError:  # the repository lacks one, which another thread may have asked for
        if together == missing:
            raise
        _fetch(folder, url, missing, lock)


def _has(folder: Path, commit: str) -> bool:
    if not (folder / ".git").is_dir():
        return False
    try:
        host_git.git(folder, "cat-file", "-e", f"{commit}^{{commit}}")
    except InstanceError:
        return False
    return True


def _clear(folder: Path) -> None:
    """Remove a killed git's files. No other git runs, because each holds our lock to its end."""
    pack = folder / ".git" / "objects" / "pack"
    for left in (*(folder / ".git").glob("*.lock"), *pack.glob("tmp_*")):
        left.unlink()


def _add_alternate(folder: Path, url: str) -> None:
    """Make git read the objects of a clone on this host in place, instead of copying them."""
    clone = Path(url)
    if clone.is_absolute() and (clone / ".git").exists():
        told = host_git.git(clone, "rev-parse", "--git-path", "objects").decode().strip()
        (folder / ".git" / "objects" / "info" / "alternates").write_text(f"{clone / told}\n")


def _fetch(folder: Path, url: str, commits: list[str], lock: int) -> None:
    words = ("fetch", "-q", "--no-tags", "--depth", "1", url, *commits)
    try:
        host_git.git(folder, *words, keep_open=(lock,))
    except InstanceError as error:
        if any(word in str(error) for word in _AWAY):
            raise RetryHere(f"cannot reach {url}: {error}", boundary=Boundary.INSTANCE) from error
        raise InstanceError(f"{url} has no commit {' or '.join(commits)}: {error}") from error
