"""Reads and writes files below a root that hostile code controls.

The kernel resolves paths inside that root (openat2): a symlink to /etc/shadow means the /etc/shadow
below that root. FIFOs and devices are refused, because they could block a worker.
"""

import asyncio
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from uuid import uuid4

from perdure.errors import Boundary, ConfigurationError, NotFound, RetryHere

_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_PR_GET_SECUREBITS, _PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 27, 28, 4
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_in_root(root: int, path: str, flags: int) -> int:
    """A descriptor of `path` as seen from the folder `root`. Raises OSError."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    fd: int = _libc.syscall(
        _OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how)
    )
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return fd


def open_file(root: Path, path: str) -> BinaryIO:
    """The regular file at `path`, for reading. Raises: NotFound."""
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        fd = open_in_root(root_fd, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise NotFound(f"cannot read {path!r} in the sandbox: {error.strerror}") from None
    finally:
        os.close(root_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotFound(f"cannot read {path!r} in the sandbox: not a regular file")
    return open(fd, "rb", buffering=0)


async def read_file(root: Path, path: str, offset: int, limit: int | None) -> bytes:
    """Bytes [offset, offset + limit) of the file. Raises: NotFound.

    Never on the event loop, because code in the sandbox could block the read.
    """
    return await asyncio.to_thread(_read_file, root, path, offset, limit)


def _read_file(root: Path, path: str, offset: int, limit: int | None) -> bytes:
    with open_file(root, path) as file:
        left = max(0, os.fstat(file.fileno()).st_size - offset)
        return _read_at(file, offset, left if limit is None else min(left, limit))


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    pieces = []
    while size > 0 and (piece := os.pread(file.fileno(), min(size, 1 << 20), offset)):
        pieces.append(piece)
        offset += len(piece)
        size -= len(piece)
    return b"".join(pieces)


async def write_file(
    root: Path, path: str, data: bytes | Path, mode: int, user: int | None = None
) -> None:
    """Write a draft in the target's folder, check its size, rename it. Creates parent folders. New
    files belong to `user` (None: this process's user); only root may name another.

    Raises: ConfigurationError when the disk is full or the folder is read-only.
    """
    await asyncio.to_thread(_write_file, root, path, data, mode, user)


def _write_file(root: Path, path: str, data: bytes | Path, mode: int, user: int | None) -> None:
    target = PurePosixPath(path)
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        with _making_files_of(user):
            folder = _open_folder(root_fd, target.parent)
            try:
                _write_in(folder, target.name, data, mode)
            finally:
                os.close(folder)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path!r} in the sandbox: {error.strerror}"
        ) from error
    finally:
        os.close(root_fd)


@contextmanager
def _making_files_of(user: int | None) -> Iterator[None]:
    """For file systems, this thread becomes that user but keeps root's rights. It is the only way
    to create files where owners are mapped, because the host's root has no id there."""
    if user is None:
        yield
        return
    bits = _libc.prctl(_PR_GET_SECUREBITS)
    _libc.prctl(_PR_SET_SECUREBITS, bits | _SECBIT_NO_SETUID_FIXUP)
    own = _libc.setfsuid(user), _libc.setfsgid(user)
    try:
        yield
    finally:
        _libc.setfsgid(own[1])
        _libc.setfsuid(own[0])
        _libc.prctl(_PR_SET_SECUREBITS, bits)


def _open_folder(root: int, path: PurePosixPath) -> int:
    try:
        return open_in_root(root, str(path), os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.ENOENT or path.parent == path:
            raise
    parent = _open_folder(root, path.parent)
    try:
        os.mkdir(path.name, 0o755, dir_fd=parent)
    except FileExistsError:
        pass
    finally:
        os.close(parent)
    return open_in_root(root, str(path), os.O_PATH | os.O_DIRECTORY)


def _write_in(folder: int, name: str, data: bytes | Path, mode: int) -> None:
    draft = f".{name[:200]}.{uuid4().hex[:8]}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            size = _copy(data, file.fileno())
            os.fchmod(file.fileno(), mode)
            if os.fstat(file.fileno()).st_size != size:
                raise RetryHere(f"short write of {name!r}", boundary=Boundary.SANDBOX)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(draft, dir_fd=folder)
        raise


def _copy(data: bytes | Path, sink: int) -> int:
    """Copy everything. Returns the size of the source in bytes."""
    if isinstance(data, bytes):
        view = memoryview(data)
        while view:
            view = view[os.write(sink, view) :]
        return len(data)
    with open(data, "rb") as source, open(sink, "wb", closefd=False) as file:
        shutil.copyfileobj(source, file, 1 << 20)
        return os.fstat(source.fileno()).st_size
