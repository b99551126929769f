"""Processes of this host, told apart from later ones that reuse their pid.

Owns reading /proc and pidfds. Which process matters, and why, is the caller's business.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A pid and its start time in clock ticks since boot: together unique."""

    pid: int
    started: int


def read_process_id(path: Path) -> ProcessId | None:
    """What the keeper wrote as `pid started ...`; None while it is absent or half written."""
    text = _read(str(path))
    if not text.endswith(b"\n"):
        return None
    pid, started = text.split()[:2]
    return ProcessId(int(pid), int(started))


def _read(path: str) -> bytes:
    """At most a page, without the cost of file objects: this is what waiting is made of."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    try:
        return os.read(fd, 4096)
    except ProcessLookupError:  # it ended between open and read
        return b""
    finally:
        os.close(fd)


def is_alive(process: ProcessId | None) -> bool:
    """True while this very process runs; a zombie is over."""
    if process is None:
        return False
    fields = _stat(process.pid)
    return bool(fields) and fields[0] not in b"ZX" and int(fields[19]) == process.started


def started_at(pid: int) -> int:
    """Start time of a process, in clock ticks since boot; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _stat(pid: int) -> list[bytes]:
    stat = _read(f"/proc/{pid}/stat")
    return stat[stat.rfind(b")") + 2 :].split()


def kill_process(process: ProcessId | None, signum: int) -> None:
    """Signal this very process, or nobody."""
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
    """Wait, without polling, until the process is over (True) or `timeout_s` has passed."""
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
    """Collect a child of ours that has ended, so that it leaves no zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def marked(marker: bytes) -> list[int]:
    """Pids whose environment holds exactly this `NAME=value`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{entry}/environ").read_bytes()
                if marker in environ.split(b"\0"):
                    found.append(int(entry))
    return found


def below(pid: int) -> list[int]:
    """Every descendant of `pid`, nearest first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            found += map(int, children)
            queue += map(int, children)
    return found
