"""Kills a command with all it started, and removes its cgroups, from the keeper's side."""

import contextlib
import os
import signal
from time import sleep

from perdure.sandboxes.host import procfs


def kill_group(group: str) -> None:
    try:
        with open(f"{group}/cgroup.kill", "w") as file:
            file.write("1")
        return
    except (FileNotFoundError, PermissionError):
        pass  # v1 or a kernel before 5.14: the file cannot be made
    while True:
        with open(f"{group}/cgroup.procs") as file:
            pids = [int(pid) for pid in file]
        if not _kill([pid for pid in pids if _runs(pid)]):
            return


def removed(group: str) -> bool:
    try:
        for entry in os.scandir(group):
            if entry.is_dir():
                with contextlib.suppress(FileNotFoundError):
                    # the process that kills the sandbox removes it too
                    os.rmdir(entry.path)
        os.rmdir(group)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def kill_marked(exec_id: str, pid: int, started: int) -> None:
    with open(f"execs/{exec_id}/run", "rb") as file:
        token = file.readline().split()[2]
    while pid:
        found = procfs.marked(b"PERDURE_EXEC=" + token)
        if procfs.started_at(pid) == started:  # otherwise the pid may be another process's
            found += [pid, *procfs.below(pid)]
        if not _kill([one for one in found if _runs(one)]):
            return


def _kill(pids: list[int]) -> bool:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if pids:
        sleep(0.001)
    return bool(pids)


def _runs(pid: int) -> bool:
    state = procfs.stat(pid)
    return bool(state) and state[0] not in b"ZX"
