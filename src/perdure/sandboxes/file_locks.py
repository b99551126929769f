"""A file lock between processes of this host."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """Hold the lock file at `path`. The kernel releases it when the process that holds it dies."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while (fd := _try_lock(path)) is None:
        await asyncio.sleep(0.005)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(fd)


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:  # otherwise its last holder removed it
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None
