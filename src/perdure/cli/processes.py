"""Processes by identity: a pid alone may be somebody else's by now, a pid with its start time not."""

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """One process for ever: `started` is its start time in clock ticks since boot."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """False for a zombie too: it only waits for its parent to look."""
        found = _stat(self.pid)
        return found is not None and found == (self.started, True)


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when there is none."""
    found = _stat(pid)
    return None if found is None else ProcessId(pid, found[0])


def stop(process: ProcessId, grace_s: float, *, group: bool = True) -> bool:
    """SIGTERM, then SIGKILL after `grace_s`; return when it is gone. True = it had to be killed.

    `group`: signal its whole process group (it leads one).
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.alive:
            return False
        _send(process.pid, signal.SIGTERM, group)
        if _gone(descriptor, grace_s):
            return False
        _send(process.pid, signal.SIGKILL, group)
        _gone(descriptor, 10.0)
        return True
    finally:
        os.close(descriptor)


def _gone(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _send(pid: int, signum: int, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, signum)


def _stat(pid: int) -> tuple[int, bool] | None:
    """Start time, and whether it still runs."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return int(fields[19]), fields[0] not in "ZX"
