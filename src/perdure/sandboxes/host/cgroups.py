"""Limits by cgroups v1 or v2, as far as this process may write them.

A sandbox gets one group per controller. Below one of them each command gets a group of its own, so
that its whole process tree can be killed. Without cgroups only prlimit remains.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perdure.sandboxes.host.procfs import runs
from perdure.types import Limits

PERIOD_US = 100_000
V1_QUOTA = "cpu.cfs_quota_us"
BUSY_S = 30.0
"""Seconds to wait for a killed group's processes to end. Only a very busy host needs longer."""
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Hierarchies:
    """Where we can make a group: controller -> parent folder for v1, and the parent folder of v2."""

    v1: Mapping[str, Path] = field(default_factory=dict)
    v2: Path | None = None
    v2_controllers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """The groups of one sandbox, before they are made."""

    folders: tuple[Path, ...] = ()
    exec_groups: Path | None = None
    joins: tuple[Path, ...] = ()
    """The `cgroup.procs` files that every command joins."""
    oom_file: Path | None = None
    writes: tuple[tuple[Path, str], ...] = ()
    enforced: Mapping[str, str] = field(default_factory=dict)


def plan(box: Path, limits: Limits, found: Hierarchies | None = None) -> Plan:
    """The groups that enforce `limits` for the sandbox in folder `box`, as far as this host allows."""
    found = found or _hierarchies()
    name = group_name(box)
    if {"memory", "pids", "cpu"} <= found.v2_controllers and found.v2 is not None:
        return _v2_plan(found.v2 / name, limits)
    return _v1_plan(found, name, limits)


def group_name(box: Path) -> str:
    """The folder is part of the name, because two homes on one host may have the same identity."""
    return f"perdure-{box.name}-{hashlib.sha256(os.fsencode(box)).hexdigest()[:8]}"


def _v2_plan(box: Path, limits: Limits) -> Plan:
    quota = f"{int(limits.cpus * PERIOD_US)} {PERIOD_US}"
    writes = [
        (box / "memory.max", str(limits.memory_mb << 20)),
        (box / "memory.swap.max", "0"),
        (box / "pids.max", str(limits.pids)),
        (box / "cpu.max", quota),
    ]
    return Plan(
        folders=(box,),
        exec_groups=box,
        oom_file=box / "memory.events",
        writes=tuple(writes),
        enforced=dict.fromkeys(("memory", "pids", "cpu"), "cgroup v2"),
    )


def _v1_plan(found: Hierarchies, name: str, limits: Limits) -> Plan:
    v1 = {controller: parent / name for controller, parent in found.v1.items()}
    writes: list[tuple[Path, str]] = []
    if "memory" in v1:
        size = str(limits.memory_mb << 20)
        writes += [(v1["memory"] / "memory.limit_in_bytes", size)]
        writes += [(v1["memory"] / "memory.memsw.limit_in_bytes", size)]
    if "pids" in v1:
        writes += [(v1["pids"] / "pids.max", str(limits.pids))]
    if "cpu" in v1:
        writes += [(v1["cpu"] / "cpu.cfs_period_us", str(PERIOD_US))]
        writes += [(v1["cpu"] / V1_QUOTA, str(int(limits.cpus * PERIOD_US)))]
    limiting = {c: v1[c] for c in ("memory", "pids", "cpu") if c in v1}
    exec_groups = found.v2 / name if found.v2 else v1.get("freezer")
    folders = [*limiting.values(), *([exec_groups] if exec_groups else [])]
    return Plan(
        folders=tuple(folders),
        exec_groups=exec_groups,
        joins=tuple(folder / "cgroup.procs" for folder in limiting.values()),
        oom_file=limiting["memory"] / "memory.oom_control" if "memory" in limiting else None,
        writes=tuple(writes),
        enforced=dict.fromkeys(limiting, "cgroup v1"),
    )


def make(plan: Plan) -> None:
    """Make the groups and set their limits. A kernel without swap accounting lacks the swap files."""
    for folder in plan.folders:
        folder.mkdir(exist_ok=True)
    for path, value in plan.writes:
        try:
            path.write_text(value)
        except FileNotFoundError:
            pass
        except OSError as error:
            # v1 refuses a quota above an ancestor's, such as a container's, which then applies.
            if error.errno != errno.EINVAL or path.name != V1_QUOTA:
                raise
    if plan.exec_groups is not None:
        (plan.exec_groups / "holder").mkdir(exist_ok=True)


def members(group: Path) -> list[int]:
    """Pids in the group and in the groups below it."""
    found: list[int] = []
    for folder, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            found += map(int, Path(folder, "cgroup.procs").read_text().split())
    return found


def below(folder: Path) -> list[Path]:
    """The commands' groups."""
    return sorted(folder.glob("x*"))


def kill(group: Path) -> None:
    """SIGKILL every process in the group and below it, including those forked during the call."""
    try:
        (group / "cgroup.kill").write_text("1")
        return
    except OSError as error:
        # v1 or a kernel before 5.14 (the file cannot be made), or the group was just removed
        if error.errno not in (errno.EACCES, errno.ENOENT, errno.ENODEV):
            raise
    while pids := [pid for pid in members(group) if runs(pid)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def remove(folders: Iterable[Path]) -> bool:
    """Remove the groups. A group is busy for a moment while its last process exits.

    False: one is still busy after `BUSY_S`, because a killed process can end late on a loaded host.
    """
    until = time.monotonic() + BUSY_S
    pause = 0.001
    left = [*folders]
    while left := [folder for folder in left if not _removed(folder)]:
        if time.monotonic() > until:
            return False
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 1.0)
    return True


def _removed(folder: Path) -> bool:
    try:
        children = [entry.path for entry in os.scandir(folder) if entry.is_dir()]
        for child in children:
            with contextlib.suppress(FileNotFoundError):  # its keeper may remove it too
                os.rmdir(child)
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


# -- what this host offers ------------------------------------------------------------------------


def _hierarchies() -> Hierarchies:
    """Read each time: it is cheap, and a running worker may be moved to another group."""
    own = _own_groups(Path("/proc/self/cgroup").read_text())
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        base = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), mount))
        if kind == "cgroup":
            for controller in {"memory", "pids", "cpu", "freezer"} & set(options.split(",")):
                parent = _writable(base, own.get(controller, "/"))
                if parent is not None:
                    v1[controller] = parent
        elif kind == "cgroup2":
            v2 = _writable_v2(base, own.get("", "/"))
    return Hierarchies(v1, v2, _delegated(v2))


def _own_groups(text: str) -> dict[str, str]:
    """Controller -> this process's group; the empty controller is v2."""
    own = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    return own


def _writable(base: Path, group: str) -> Path | None:
    """The process's own group, or the hierarchy's root if a container hides that path."""
    for folder in (base / group.lstrip("/"), base):
        if folder.is_dir():
            return folder if os.access(folder, os.W_OK) else None
    return None


def _writable_v2(base: Path, group: str) -> Path | None:
    """A v2 group with processes cannot delegate controllers: go up to a group without processes."""
    folder = _writable(base, group)
    if folder is None:
        return None
    for candidate in (folder, *folder.parents):
        if candidate == base or not _is_under(candidate, base):
            break
        if os.access(candidate, os.W_OK) and _delegated(candidate):
            return candidate
    return base if os.access(base, os.W_OK) else folder


def _is_under(folder: Path, base: Path) -> bool:
    return base in folder.parents


def _delegated(group: Path | None) -> frozenset[str]:
    if group is None:
        return frozenset()
    try:
        return frozenset((group / "cgroup.subtree_control").read_text().split())
    except FileNotFoundError:
        return frozenset()
