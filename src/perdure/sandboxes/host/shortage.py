"""Whether this host refused a sandbox processes or memory that the sandbox's own limits allow.

The kernel counts refusals for each cgroup. It does not count refusals by limits that belong to no
cgroup (`kernel.pid_max`, a user's processes, memory overcommit), so this module misses them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

MARGIN = 4 << 20
"""Bytes: the kernel charges memory in batches, so it may refuse one a little below the limit."""

Shortage = Literal["", "disk", "processes", "memory"]


class Refusals(NamedTuple):
    """The kernel's current counts. They only grow."""

    above: int
    """Forks that the groups above the sandbox's have refused."""
    own: int
    """Forks that were refused in the sandbox's own groups."""
    kills: int
    """Processes of the sandbox that were killed for lack of memory."""

    @classmethod
    def of(cls, groups: Iterable[str]) -> "Refusals":
        folders = [Path(group) for group in groups]
        above = {parent for folder in folders for parent in folder.parents}
        return cls(
            sum(map(_refused, above)), sum(map(_refused, folders)), sum(map(_killed, folders))
        )

    @classmethod
    def parse(cls, text: str) -> "Refusals":
        return cls(*map(int, text.split("/")))

    def __str__(self) -> str:
        return "/".join(map(str, self))

    def shortage(self, before: "Refusals", groups: Iterable[str]) -> Shortage:
        """What the host has refused since `before` to the sandbox with these groups."""
        folders = [Path(group) for group in groups]
        own = self.own > before.own and not any(map(_was_full, folders))
        if self.above > before.above or own:
            return "processes"
        killed = self.kills > before.kills and not any(map(_reached_its_memory, folders))
        return "memory" if killed else ""


NONE_REFUSED = Refusals(0, 0, 0)


def _refused(folder: Path) -> int:
    """Since Linux 6.11 `pids.events` of cgroup v2 also counts groups below, `pids.events.local` does not.

    cgroup v1, and v2 before 6.11, count in the forking process's group, whichever group refused.
    """
    local = _fields(folder / "pids.events.local")
    return (local or _fields(folder / "pids.events")).get("max", 0)


def _was_full(folder: Path) -> bool:
    """Whether the group's own process limit may be the cause. An old kernel does not tell."""
    if not (folder / "pids.events").exists():
        return False
    peak, limit = _number(folder / "pids.peak"), _number(folder / "pids.max")
    return peak is None or (limit is not None and peak >= limit)


def _killed(folder: Path) -> int:
    events = _fields(folder / "memory.events") or _fields(folder / "memory.oom_control")
    return events.get("oom_kill", 0)


def _reached_its_memory(folder: Path) -> bool:
    if _fields(folder / "memory.events").get("oom", 0):
        return True
    most = _number(folder / "memory.max_usage_in_bytes")
    limit = _number(folder / "memory.limit_in_bytes")
    return most is not None and limit is not None and most + MARGIN >= limit


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # another hierarchy, or the group is gone
        return {}
    pairs = (line.split() for line in lines)
    return {name: int(value) for name, value in pairs}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None
