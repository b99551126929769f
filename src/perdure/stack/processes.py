"""Stops processes by pid and start time: the kernel may have given the pid alone to another process."""

import contextlib
import os
import select
import signal

from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.process import ProcessId


def identify(pid: int) -> ProcessId | None:
    """Pid and start time of the process with this pid; None when there is none."""
    started = procfs.started_at(pid)
    return ProcessId(pid, started) if started else None


def stop(process: ProcessId, grace_s: float, *, group: bool = True) -> bool:
    """Send SIGTERM, after `grace_s` SIGKILL; return when the process is gone. True: SIGKILL was needed.

    `group`: signal the process group that it leads.
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
