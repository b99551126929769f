"""Runs one engine server as its child and ends all of its processes once the owner has ended.

A separate program that needs only the standard library:
`python -m perdure.serving.engine_supervisor NOTE GRACE_S -- COMMAND`. The owner keeps the other end of its
stdin open and never writes, so the pipe closes however the owner ends. vLLM's EngineCore and workers
share the server's process group. If the server dies, they become children of this process.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_S = 5.0
"""Seconds to wait for the group to end after SIGKILL."""
REAP_S = 0.02
NO_COMMAND = 127

Child = subprocess.Popen[bytes]


def main(arguments: Sequence[str]) -> int:
    note, grace, dashes, *command = arguments
    if dashes != "--" or not command:
        raise SystemExit("usage: supervisor NOTE GRACE_S -- COMMAND")
    return supervise(command, Path(note), float(grace))


def supervise(command: Sequence[str], note: Path, grace_s: float) -> int:
    """Run the command until it ends, SIGTERM arrives or stdin closes; then end its whole group.

    Returns the command's exit status, or 128 + N for signal N. The file `note` names the group while
    the group exists.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = _start(command)
    except OSError as error:
        print(f"perdure: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NO_COMMAND
    _write_note(note, child.pid)
    _wait(child, stop)
    _end_group(child, grace_s)
    note.unlink(missing_ok=True)
    status = child.returncode
    return 128 - status if status < 0 else status


def _start(command: Sequence[str]) -> Child:
    def die_with_me() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_me,  # noqa: PLW1509 (this process never has a second thread)
    )


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _wait(child: Child, stop: int) -> None:
    """Wait until the child has ended, SIGTERM has arrived or the owner's end of stdin has closed."""
    ended = os.pidfd_open(child.pid)
    try:
        while True:
            ready, _, _ = select.select([0, stop, ended], [], [])
            if ended in ready or stop in ready or not os.read(0, 4096):
                return
    finally:
        os.close(ended)


def _end_group(child: Child, grace_s: float) -> None:
    """Send SIGTERM, later SIGKILL, until the group is empty; reap all orphans."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
        if not _signal_group(child.pid, number):
            break
        end = time.monotonic() + patience_s
        while _reap(child) and _signal_group(child.pid, 0) and time.monotonic() < end:
            time.sleep(REAP_S)
    child.poll()


def _reap(child: Child) -> bool:
    """Reap ended children. True while another child still runs."""
    child.poll()  # first, so that waitpid below does not take the child's status
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child.pid:
                child.returncode = os.waitstatus_to_exitcode(status)
            if pid == 0:
                return True
    return False


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


# --- processes that a killed supervisor left behind ---------------------------------------------


def _write_note(note: Path, group: int) -> None:
    me = os.getpid()
    content = {
        "group": group,
        "started": _started(group),
        "supervisor": me,
        "supervisor_started": _started(me),
        "boot_id": _boot_id(),
    }
    draft = note.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.rename(note)


def end_orphans(folder: Path) -> list[str]:
    """Kill process groups whose supervisors have died, before a new server uses the device. Returns the
    names of their notes."""
    return [note.stem for note in sorted(folder.glob("*.note")) if _end_orphan(note)]


def _end_orphan(note: Path) -> bool:
    """True if the group had to be killed."""
    try:
        content: dict[str, Any] = json.loads(note.read_text())
    except (OSError, ValueError):
        return False
    same_host_boot = content["boot_id"] == _boot_id()
    if same_host_boot and _started(content["supervisor"]) == content["supervisor_started"]:
        return False
    group, leader = int(content["group"]), _started(int(content["group"]))
    # The kernel never reuses a pid while a group has that id, so a group without its leader is the old
    # one.
    ours = same_host_boot and leader in (None, content["started"])
    killed = ours and _signal_group(group, signal.SIGKILL)
    note.unlink(missing_ok=True)
    return killed


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
