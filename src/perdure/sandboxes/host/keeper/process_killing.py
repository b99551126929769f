"""Kills a command with all its processes, or all processes in a sandbox; removes cgroups.

Keepers use it, and workers in a thread. Every process remains a descendant of its sandbox's pid 1
or keeper, so an empty environment, a new session or a dead parent does not hide it.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from time import monotonic, sleep

from perdure.sandboxes.host import procfs

ENOUGH_S = 30.0
"""Seconds after which killing gives up. Only a process that forks constantly takes that long."""
_CLEAN_LOOKS = 2
"""Times in a row that no process must be found: one may move between two lists during a search."""
_MARK = b"PERDURE_EXEC="


def kill_group(group: str) -> bool:
    """Kill all processes in a command's cgroup. False: one still runs.

    The kernel's `cgroup.kill` catches processes that fork constantly, but it misses a process whose
    first thread has ended. So each member is killed too.
    """
    with contextlib.suppress(OSError), open(f"{group}/cgroup.kill", "w") as file:
        file.write("1")  # v1 and kernels before 5.14 cannot

    def left() -> Iterable[int]:
        try:
            with open(f"{group}/cgroup.procs") as file:
                return [int(pid) for pid in file]
        except OSError:
            return []  # it was removed, so it was empty

    return _until_none(left)


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


def end_command(
    execs: str, exec_id: str, process: tuple[int, int], keeper: int, own: Collection[int]
) -> bool:
    """Kill a command that has no cgroup, and every process it started. False: one still runs.

    `execs`: the folder of the sandbox's commands. `process`: pid and start time of the command's
    first process. `own`: the sandbox's own processes. If it has none (no namespaces), a process
    whose parent has ended is found only by the mark in its environment.
    """
    pid, started = process
    token = _token(f"{execs}/{exec_id}")
    if not pid:
        return True
    if not own:
        return _until_none(lambda: _marked_or_below(token, pid, started))

    def left() -> Iterable[int]:
        """Spares processes that descend from another command's first process or bear its mark."""
        tree = _tree(keeper, *own)
        ours = [pid] if procfs.started_at(pid) == started else []
        ours += _below(ours, tree)
        spared = {*ours, *own}
        orphans = [one for one in _below(own, tree) if one not in spared]
        if orphans:
            others = {_token(f"{execs}/{name}") for name in os.listdir(execs)} - {token, b""}
            orphans = [one for one in orphans if _mark_of(one) not in others]
        return (*ours, *orphans)

    return _until_none(left)


def end_all(keeper: int, own: Collection[int], sidecars: int | None = None) -> bool:
    """Kill all processes in the sandbox's pid namespace except `own`. False: one still runs.
    `sidecars`: pid 1 of another pid namespace that the keeper made; it and its children live on."""

    depth = procfs.depth(keeper)

    def left() -> Iterable[int]:
        tree = _tree(keeper, *own, without=sidecars)
        found = {one for ones in tree.values() for one in ones}.difference(own, [sidecars])
        return [one for one in found if procfs.depth(one) > depth]

    return _until_none(left)


def _tree(*roots: int, without: int | None = None) -> Mapping[int, list[int]]:
    """Parent -> children, for `roots` and all their descendants, except below `without`."""
    found: dict[int, list[int]] = {} if without is None else {without: []}
    queue = [*roots]
    for parent in queue:
        if parent not in found:
            found[parent] = procfs.children(parent)
            queue += found[parent]
    return found


def _below(pids: Iterable[int], tree: Mapping[int, list[int]]) -> list[int]:
    found = [child for pid in pids for child in tree.get(pid, ())]
    for pid in found:
        found += tree.get(pid, ())
    return found


def _marked_or_below(token: bytes, pid: int, started: int) -> list[int]:
    found = procfs.marked(_MARK + token)
    if procfs.started_at(pid) == started:  # otherwise the pid may be another process's
        found += [pid, *procfs.below(pid)]
    return found


def _token(folder: str) -> bytes:
    """The mark of the processes of this folder's command; empty if there is none."""
    words = procfs.read(f"{folder}/run").split(b"\n", 1)[0].split()
    return words[2] if len(words) > 2 else b""


def _mark_of(pid: int) -> bytes:
    """The token in the process's environment, which the process may have chosen itself."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for variable in file.read().split(b"\0"):
            if variable.startswith(_MARK):
                return variable.removeprefix(_MARK)
    return b""


def _until_none(left: Callable[[], Iterable[int]]) -> bool:
    clean, end = 0, monotonic() + ENOUGH_S
    while clean < _CLEAN_LOOKS:
        clean = 0 if _kill([pid for pid in left() if procfs.runs(pid)]) else clean + 1
        if monotonic() > end:
            return False
    return True


def _kill(pids: list[int]) -> bool:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if pids:
        sleep(0.001)
    return bool(pids)
