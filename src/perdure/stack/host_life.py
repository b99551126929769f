"""The process that shows a host's signs of life, seen from the other processes of its home.

It runs `python -m workers.host.life`, one per home. Locks tell who is there: the kernel releases them when a
process dies, and a stopped process keeps its own.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import IO

from perdure.settings.tree import Settings
from perdure.stack.processes import identify, stop

WORKERS, LIFE = "workers.lock", "life.lock"
STOP_GRACE_S = 10.0


@contextlib.contextmanager
def worker_is_here(settings: Settings) -> Iterator[None]:
    """Within, this home has a worker."""
    with _open(settings, WORKERS) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def has_worker(settings: Settings) -> bool:
    return _is_locked(settings, WORKERS)


@contextlib.contextmanager
def life_is_here(settings: Settings) -> Iterator[bool]:
    """Within, this home has the process. False: it has another one already."""
    with _open(settings, LIFE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        os.truncate(file.fileno(), 0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        yield True


def has_life(settings: Settings) -> bool:
    return _is_locked(settings, LIFE)


def end(settings: Settings) -> bool:
    """End the process, after the home's sandboxes. False: there was none."""
    if not _is_locked(settings, LIFE):
        return False
    with _open(settings, LIFE) as file:
        file.seek(0)
        text = file.read().strip()
    process = identify(int(text)) if text else None
    if process is None:
        return False
    stop(process, STOP_GRACE_S)
    return True


def _open(settings: Settings, name: str) -> IO[bytes]:
    folder = settings.home.absolute() / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / name).open("ab+")


def _is_locked(settings: Settings, name: str) -> bool:
    with _open(settings, name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
