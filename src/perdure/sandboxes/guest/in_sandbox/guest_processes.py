"""Finds and kills processes of the sandbox.

Runs inside a remote sandbox with `guest`. Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SETTLE_S = 10.0


def kill_all(find: Callable[[], list[int]]) -> None:
    """Kill what `find` finds, in rounds, until it finds nothing.

    A process that forks and exits at once escapes a single scan of /proc: its child is too young to
    be listed, and the parent is gone when its entry is read. An empty scan counts only if no
    process was born during it. Elsewhere, where other programs start processes all the time, that
    is bounded by SETTLE_S.
    """
    finish = time.monotonic() + SETTLE_S
    while True:
        born = last_born()
        pids = find()
        if not pids and (born == last_born() or time.monotonic() > finish):
            return
        for pid in pids:
            kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def last_born() -> str:
    """The youngest pid of this pid namespace, alive or not. Constant where the kernel hides it."""
    with open("/proc/loadavg") as file:
        return file.read().split()[-1]


def kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def below(pid: int) -> list[int]:
    """Every live process that descends from `pid`."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for entry in os.listdir("/proc"):
        stat = stat_of(entry) if entry.isdigit() else None
        if stat is not None:
            # a process whose first thread has ended shows as a zombie while other threads run
            lives = stat[0] not in "ZX" or int(stat[17]) > 1
            children.setdefault(int(stat[1]), []).append((int(entry), lives))
    found, queue = [], [pid]
    while queue:
        for child, lives in children.get(queue.pop(), []):
            queue.append(child)
            if lives:
                found.append(child)
    return found


def marked(marker: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open("/proc/" + entry + "/environ", "rb") as file:
                    if marker.encode() in file.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:
                continue
    return found


def stat_of(pid: object) -> list[str] | None:
    """Fields after the name: state, parent, ...; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> str | None:
    stat = stat_of(pid)
    return stat[19] if stat is not None and stat[0] not in "ZX" else None


def alive(process: tuple[int, str]) -> bool:
    return process[0] > 0 and start_time(process[0]) == process[1]
