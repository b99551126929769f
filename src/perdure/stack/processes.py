"""Found and stopped by identity: a pid alone may be somebody else's by now, with its start time not."""

import contextlib
import os
import select
import signal

from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.process import ProcessId


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when there is none."""
    started = procfs.started_at(pid)
    return ProcessId(pid, started) if started else None


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
