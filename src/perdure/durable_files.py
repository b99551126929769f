"""Files and folders that are made once and believed from then on, also after a power cut.

A rename may reach the disk before the data of what it names. So both are written to the disk first. A
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
"""In a published folder: the digest of the names and sizes of all that it holds."""

DAMAGED = ".damaged-"
"""Prefix of a folder that was not whole and has been replaced."""
KEPT_S = 7 * 86400.0
"""Seconds until it is removed: longer than a sandbox lives that may use its files."""

_libc = ctypes.CDLL(None, use_errno=True)
_whole: set[tuple[int, int]] = set()
"""Identities of the folders that this process has made or checked. A power cut ends the process."""


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
    """Rename a complete file to the name under which it is believed."""
    _fsync(draft)
    draft.replace(path)
    _fsync(path.parent)
    return path


def publish_folder(draft: Path, folder: Path) -> None:
    """Rename a complete folder to the name under which it is believed.

    A damaged folder of that name is renamed, because running sandboxes may use its files. A later
    call removes it.
    One `syncfs` writes all files of its disk, because an environment has thousands of them. It also
    covers what the build kept elsewhere on that disk, such as a cache.
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
    """Whether a published folder is there and holds what it was published with.

    A process walks each folder once. Content of the right size is not read.
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


def check_again() -> None:
    """Walk each folder once more before it is believed: something of this host was damaged."""
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
    """Of names, kinds and sizes. Python may add bytecode to a folder that is in use."""
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
