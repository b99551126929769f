"""Stops processes by pid and start time: the kernel may have given the pid to another process."""

import contextlib
import os
import select
import signal

from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.host_processes import ProcessId


def identify(pid: int) -> ProcessId | None:
    """The pid and start time of the process with this pid; None if there is none."""
    started = procfs.started_at(pid)
    return ProcessId(pid, started) if started else None


def stop(process: ProcessId, grace_s: float, *, group: bool = True) -> bool:
    """Send SIGTERM, and SIGKILL after `grace_s`. Return when the process is gone.

    `group`: signal the process group that it leads. True: SIGKILL was needed.
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
