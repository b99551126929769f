"""Files and folders that are published once and stay valid after a power cut.

A rename may reach the disk before the data of the renamed file, so the data is synced first. A
folder also gets a manifest, and a folder that does not match its manifest counts as absent.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import time
from pathlib import Path
from uuid import uuid4

MANIFEST = ".perdure-manifest"
"""File in a published folder with a digest of the names and sizes of its contents."""

DAMAGED = ".damaged-"
"""Prefix of a damaged folder that has been replaced."""
KEPT_S = 7 * 86400.0
"""Seconds until a damaged folder is removed. It exceeds the life of any sandbox that may use its
files."""

_libc = ctypes.CDLL(None, use_errno=True)
_whole: set[tuple[int, int]] = set()
"""Device and inode of the folders that this process has published or checked. A power cut ends the
process and so empties it."""


def write_file(path: Path, text: str, *, times: tuple[float, float] | None = None) -> None:
    """Replace a small file. A power cut leaves the old content or the new one."""
    draft = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        with draft.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if times is not None:
            os.utime(draft, times)
        publish_file(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def publish_file(draft: Path, path: Path) -> Path:
    """Rename a complete file to its final name, durably."""
    _fsync(draft)
    draft.replace(path)
    _fsync(path.parent)
    return path


def publish_folder(draft: Path, folder: Path) -> None:
    """Rename a complete folder to its final name, durably.

    A damaged folder of that name is renamed, because running sandboxes may use its files. A later
    call removes it. One `syncfs` syncs the whole file system, because an environment has thousands
    of files. It also covers other files of the build on that file system, such as a cache.
    """
    (draft / MANIFEST).write_text(_digest(draft))
    handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(handle) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(draft))
    finally:
        os.close(handle)
    _remove_old(folder.parent)
    if folder.exists():
        os.utime(folder)
        folder.rename(folder.with_name(f"{DAMAGED}{uuid4().hex}"))
    draft.rename(folder)
    _fsync(folder.parent)
    _whole.add(_identity(folder))


def is_whole(folder: Path) -> bool:
    """Whether a published folder exists and is undamaged.

    A process walks each folder once. It compares names and sizes and does not read contents.
    """
    try:
        identity = _identity(folder)
        if identity in _whole:
            return True
        expected = (folder / MANIFEST).read_text()
        if not expected or expected != _digest(folder):
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    _whole.add(identity)
    return True


def forget_checked_folders() -> None:
    """Make `is_whole` walk each folder again, because something on this host was damaged."""
    _whole.clear()


def _remove_old(parent: Path) -> None:
    for old in parent.glob(f"{DAMAGED}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if time.time() - old.stat().st_mtime > KEPT_S:
                shutil.rmtree(old, ignore_errors=True)


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _digest(folder: Path) -> str:
    """Digest of names, modes and sizes. Ignores the bytecode that Python may add to a folder in
    use."""
    digest = hashlib.sha256()
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted((*folders, *files)):
            path = os.path.join(where, name)
            if path != os.path.join(folder, MANIFEST):
                state = os.lstat(path)
                size = 0 if name in folders else state.st_size
                entry = f"{os.path.relpath(path, folder)}\0{state.st_mode:o}\0{size}\n"
                digest.update(os.fsencode(entry))
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
