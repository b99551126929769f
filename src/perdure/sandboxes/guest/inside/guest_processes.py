"""Finds and kills processes of the sandbox.

Runs inside a remote sandbox with `guest`. Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time


def slaughter(pid: int) -> None:
    """Kill every descendant of `pid`, in rounds: each kills what forked during the previous one."""
    while True:
        pids = below(pid)
        if not pids:
            return
        for child in pids:
            kill(child, signal.SIGKILL)
        time.sleep(0.002)


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
