"""Starts, finds and ends the process that shows a host's signs of life.

Workers start one per home, `python -m workers.host.host_heartbeat`; `workers/host/README.md` draws what it does.
File locks show which processes exist: the kernel releases a lock when its process dies, and a stopped
process (SIGSTOP) keeps its lock.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import IO

from perdure.client.temporal_server import configured_address
from perdure.errors import ConfigurationError
from perdure.sandboxes.host.host_processes import ProcessId
from perdure.settings.settings_tree import Settings
from perdure.stack.process_stopping import identify, stop

WORKERS, GRADERS, LIFE = "workers.lock", "graders.lock", "life.lock"
STOP_GRACE_S = 10.0
LOOK_S = 2.0
"""Seconds between two checks for the process."""


@contextlib.contextmanager
def hold_role_locks(settings: Settings, roles: Collection[str]) -> Iterator[None]:
    """Marks, inside the context, whether this home has agents and gradings.

    Raises: ConfigurationError if it has both and `host.grades_apart` is set. Two workers that start
    at once may both be refused.
    """
    with contextlib.ExitStack() as locks:
        if {"boot", "agent"} & set(roles):
            locks.enter_context(hold_worker_lock(settings))
        if "grade" in roles:
            locks.enter_context(_held(settings, GRADERS))
        if settings.host.grades_apart and all(_is_locked(settings, n) for n in (WORKERS, GRADERS)):
            raise ConfigurationError(
                "PERDURE_HOST__GRADES_APART=true: role grade cannot share a host with roles boot "
                "and agent; start `python -m workers grade` on another host, or unset it"
            )
        yield


def hold_worker_lock(settings: Settings) -> AbstractContextManager[None]:
    """Marks, inside the context, that this home has a worker for agents."""
    return _held(settings, WORKERS)


def has_worker(settings: Settings) -> bool:
    return _is_locked(settings, WORKERS)


@contextlib.contextmanager
def hold_heartbeat_lock(settings: Settings) -> Iterator[bool]:
    """Marks, inside the context, that this is the home's process. False: another one exists already."""
    with _open(settings, LIFE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        os.truncate(file.fileno(), 0)
        file.write(f"{os.getpid()}\n{configured_address(settings) or ''}\n".encode())
        file.flush()
        yield True


async def keep_alive(settings: Settings) -> None:
    """Run in a worker: start the process whenever this home has none.

    A started process counts before it takes the lock, which takes a while on a busy host.
    """
    import structlog  # not at the top: commands import this module but do not log

    log = structlog.get_logger("perdure.life")
    started: subprocess.Popen[bytes] | None = None
    if _end_of_another_server(settings):
        log.warning("killed the process that showed signs of life to another Temporal address")
    while True:
        try:
            is_starting = started is not None and started.poll() is None
            if not is_starting and not _is_locked(settings, LIFE):
                started = await asyncio.to_thread(_start, settings)
                log.info("started the process that shows the host's signs of life", pid=started.pid)
        except OSError as error:  # a full disk, or no more processes allowed
            log.warning("cannot start the process that shows signs of life", reason=str(error))
        await asyncio.sleep(LOOK_S)


def _start(settings: Settings) -> "subprocess.Popen[bytes]":
    logs = settings.home.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "life.log").open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.host.host_heartbeat"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def end(settings: Settings) -> bool:
    """End the process; call this after the home's sandboxes have ended. False: there was none."""
    process, _ = _found(settings)
    if process is None:
        return False
    stop(process, STOP_GRACE_S)
    return True


def _end_of_another_server(settings: Settings) -> bool:
    """Kill the process if it reports to another Temporal address than these settings name.

    It outlives its stack while sandboxes exist. It gets no chance to say goodbye, so that the next
    process continues its term and the sandboxes stay.
    """
    process, address = _found(settings)
    if process is None or address == (configured_address(settings) or ""):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    return True


def _found(settings: Settings) -> tuple[ProcessId | None, str]:
    """The process and the Temporal address that it reports to."""
    if not _is_locked(settings, LIFE):
        return None, ""
    with _open(settings, LIFE) as file:
        file.seek(0)
        pid, _, address = file.read().decode().partition("\n")
    return (identify(int(pid)) if pid else None), address.strip()


def _open(settings: Settings, name: str) -> IO[bytes]:
    folder = settings.home.absolute() / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / name).open("ab+")


@contextlib.contextmanager
def _held(settings: Settings, name: str) -> Iterator[None]:
    with _open(settings, name) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _is_locked(settings: Settings, name: str) -> bool:
    with _open(settings, name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
