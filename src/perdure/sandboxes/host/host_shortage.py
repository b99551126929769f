"""Whether this host refused a sandbox processes or memory that the sandbox's own limits allow.

The kernel counts refusals for each cgroup. It does not count refusals by limits that belong to no
cgroup (`kernel.pid_max`, a user's processes, memory overcommit), so this module misses them.
"""

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from perdure.sandboxes.host import procfs

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
    def of(cls, groups: Sequence[str]) -> "Refusals":
        return cls(
            sum(map(_refused_above, groups)),
            sum(_refused(group) or 0 for group in groups),
            sum(map(_killed, groups)),
        )

    @classmethod
    def parse(cls, text: str) -> "Refusals":
        return cls(*map(int, text.split("/")))

    def __str__(self) -> str:
        return "/".join(map(str, self))

    def shortage(self, before: "Refusals", groups: Sequence[str]) -> Shortage:
        """What the host has refused since `before` to the sandbox with these groups."""
        own = self.own > before.own and not any(map(_was_full, groups))
        if self.above > before.above or own:
            return "processes"
        killed = self.kills > before.kills and not any(map(_reached_its_memory, groups))
        return "memory" if killed else ""


NONE_REFUSED = Refusals(0, 0, 0)


def _refused_above(group: str) -> int:
    """Of the groups above. A hierarchy's root, and one without this controller, count nothing."""
    total = 0
    while (refused := _refused(group := os.path.dirname(group))) is not None:
        total += refused
    return total


def _refused(group: str) -> int | None:
    """Since Linux 6.11 `pids.events` of cgroup v2 also counts groups below, `pids.events.local` does not.

    cgroup v1, and v2 before 6.11, count in the forking process's group, whichever group refused.
    """
    events = _fields(f"{group}/pids.events.local") or _fields(f"{group}/pids.events")
    return events.get("max")


def _was_full(group: str) -> bool:
    """Whether the group's own process limit may be the cause. An old kernel does not tell."""
    if not _fields(f"{group}/pids.events"):
        return False
    peak, limit = _number(f"{group}/pids.peak"), _number(f"{group}/pids.max")
    return peak is None or (limit is not None and peak >= limit)


def _killed(group: str) -> int:
    events = _fields(f"{group}/memory.events") or _fields(f"{group}/memory.oom_control")
    return events.get("oom_kill", 0)


def _reached_its_memory(group: str) -> bool:
    if _fields(f"{group}/memory.events").get("oom", 0):
        return True
    most = _number(f"{group}/memory.max_usage_in_bytes")
    limit = _number(f"{group}/memory.limit_in_bytes")
    return most is not None and limit is not None and most + MARGIN >= limit


def _fields(path: str) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {name: int(value) for name, value in pairs}


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # otherwise it is not there, or "max"


def _text(path: str) -> str:
    """Empty in another hierarchy, or if the group is gone."""
    try:
        return procfs.read(path).decode()
    except OSError:
        return ""
