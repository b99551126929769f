"""Traces of a home on this host: processes, sandboxes, mounts, cgroups, folders."""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from perdure.cli.demo.small_disk import MOUNT_POINT
from perdure.sandboxes.host import procfs

CGROUPS = Path("/sys/fs/cgroup")
PODMAN_PAUSE = b"catatonit\0-P\0"
"""Command line of rootless Podman's pause process. A user's first Podman command starts it, and our
search for Podman sandboxes may be that command."""


@dataclass(frozen=True)
class Traces:
    """Each is a set of names, pids with their start times, or paths."""

    processes: frozenset[str] = frozenset()
    sandboxes: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    cgroups: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()

    def __sub__(self, earlier: "Traces") -> "Traces":
        return Traces(
            **{kind: found - getattr(earlier, kind) for kind, found in vars(self).items()}
        )

    def __or__(self, other: "Traces") -> "Traces":
        return Traces(**{kind: found | getattr(other, kind) for kind, found in vars(self).items()})

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def lines(self) -> list[str]:
        return [f"{kind}: {name}" for kind, names in vars(self).items() for name in sorted(names)]


def traces(home: Path, sandboxes: Collection[str], *, stack: bool) -> Traces:
    """`sandboxes`: beginnings of the names of sandboxes whose cgroups count. `stack`: also count the
    processes of the stack, and temporary folders."""
    temporary = [*home.glob("scratch/*"), *home.glob(f"run/{MOUNT_POINT}")] if stack else []
    return Traces(
        processes=frozenset(_processes(home, stack=stack)),
        sandboxes=frozenset(str(path) for path in (home / "sandboxes").glob("*/p-*")),
        mounts=frozenset(point for point in procfs.mount_points() if _is_in(point, home)),
        cgroups=frozenset(_cgroups(sandboxes)),
        folders=frozenset(map(str, temporary)),
    )


def _is_in(path: str, home: Path) -> bool:
    return path == str(home) or path.startswith(f"{home}/")


def _processes(home: Path, *, stack: bool) -> list[str]:
    """A sandbox's processes have its folder in their environment. The stack's processes have the
    home in their environment or their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        mark = f"PERDURE_BOX={home}/".encode()
        own = int(pid) == os.getpid()
        if mark in _text(pid, "environ") or (stack and not own and _is_of_stack(pid, home)):
            command = _text(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace")
            found.append(f"{pid} {procfs.started_at(int(pid))} {command[:80].strip()}")
    return found


def _is_of_stack(pid: str, home: Path) -> bool:
    name = re.escape(str(home)).encode() + rb"(/|\0|$)"
    if _text(pid, "cmdline") == PODMAN_PAUSE:
        return False
    return any(re.search(name, _text(pid, file)) for file in ("environ", "cmdline"))


def _text(pid: str, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return b""


def _cgroups(sandboxes: Collection[str]) -> list[str]:
    beginnings = tuple(f"perdure-{name}" for name in sandboxes)
    return [
        os.path.join(where, name)
        for where, names, _ in os.walk(CGROUPS)
        for name in names
        if beginnings and name.startswith(beginnings)
    ]
