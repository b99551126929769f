"""Processes of this host, distinguished from later ones that reuse their pid. Owns pidfds."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection
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
    return await one_ended((process,), timeout_s)


async def one_ended(processes: Collection[ProcessId], timeout_s: float | None) -> bool:
    """Wait, without polling, until one of them ends (True) or `timeout_s` has passed."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    with contextlib.ExitStack() as stack:
        for process in processes:
            try:
                pidfd = os.pidfd_open(process.pid) if process.pid else None
            except ProcessLookupError:
                return True
            if pidfd is None:
                return True
            stack.callback(os.close, pidfd)
            if not is_alive(process):
                return True
            loop.add_reader(pidfd, _set, over)
            stack.callback(loop.remove_reader, pidfd)
        await asyncio.wait((over,), timeout=timeout_s)
        return over.done()


def _set(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)


def reap(pid: int) -> None:
    """Collect a child of this process that has ended, so that it leaves no zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
