"""Processes of this host, told apart from later ones that reuse their pid. Owns pidfds."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

from perdure.sandboxes.host import procfs


class ProcessId(NamedTuple):
    """A pid and its start time in clock ticks since boot. Together they are unique."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether this process still runs. A zombie does not."""
        fields = procfs.stat(self.pid)
        return bool(fields) and fields[0] not in b"ZX" and int(fields[19]) == self.started


def read_process_id(path: Path) -> ProcessId | None:
    """What the keeper wrote as `pid started ...`; None while the file is absent or incomplete."""
    text = procfs.read(str(path))
    if not text.endswith(b"\n"):
        return None
    pid, started = text.split()[:2]
    return ProcessId(int(pid), int(started))


def is_alive(process: ProcessId | None) -> bool:
    return process is not None and process.alive


def kill_process(process: ProcessId | None, signum: int) -> None:
    """Signal this process; if it has ended, no process gets the signal."""
    if process is None or not is_alive(process):
        return
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


async def ended(process: ProcessId, timeout_s: float) -> bool:
    """Wait, without polling, until the process ends (True) or `timeout_s` has passed."""
    if not process.pid:
        return True
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    try:
        if not is_alive(process):
            return True
        loop.add_reader(pidfd, _set, over)
        await asyncio.wait((over,), timeout=timeout_s)
        return over.done()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _set(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)


def reap(pid: int) -> None:
    """Collect a child of this process that has ended, so that it leaves no zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
