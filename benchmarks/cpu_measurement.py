"""Counts CPU seconds of everything that a command starts: children, daemons, commands that live 5 ms.

If this process may create a control group, the group counts exactly. Otherwise a reaper process adopts
every orphan, and the kernel sums the CPU of its waited-for children. Callers measure wall time.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")

JOIN = 'echo $$ > "$0" && exec "$@"'

REAPER = """
import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
first = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
code = 0
while True:
    try:
        pid, status = os.wait()
    except ChildProcessError:
        break
    if pid == first:
        code = os.waitstatus_to_exitcode(status)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
open(sys.argv[1], "w").write(str(used.ru_utime + used.ru_stime))
sys.exit(code if code >= 0 else 128 - code)
"""


@dataclass
class Meter:
    """Counts the CPU of processes that `popen` and `run` start. Close it once all of them have ended.

    Example:
        with Meter.open("harbor", folder) as meter:
            meter.run(["harbor", "run", ...])
            print(meter.seconds(), meter.how)
    """

    folder: Path
    group: Path | None
    leaf: Path | None
    _reapers: list[tuple[int, Path]] = field(default_factory=list)

    @classmethod
    def open(cls, name: str, folder: Path) -> "Meter":
        folder.mkdir(parents=True, exist_ok=True)
        group, leaf = _make_group(f"perdure-bench-{os.getpid()}-{name}")
        return cls(folder, group, leaf)

    @property
    def how(self) -> str:
        """The method of counting, for the report."""
        return "control group" if self.group else "waited-for children and /proc"

    def popen(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        if self.leaf is not None:
            joined = ["sh", "-c", JOIN, str(self.leaf / "cgroup.procs"), *argv]
            return subprocess.Popen(joined, **options)
        total = self.folder / f"cpu-{len(self._reapers)}"
        command = [sys.executable, "-I", "-S", "-c", REAPER, str(total), *argv]
        process: subprocess.Popen[bytes] = subprocess.Popen(command, **options)
        self._reapers.append((process.pid, total))
        return process

    def run(self, argv: Sequence[str], log: Path, **options: Any) -> int:
        """Run a command to its end, with stdout and stderr in `log`. Returns the exit code."""
        with log.open("ab") as file:
            process = self.popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options
            )
            with ended_if_interrupted(process):
                return process.wait()

    def seconds(self) -> float:
        """User plus system time so far."""
        if self.group is not None:
            return _group_seconds(self.group)
        return sum(
            float(total.read_text()) if total.exists() else _tree_seconds(pid)
            for pid, total in self._reapers
        )

    def pids(self) -> list[int]:
        """Started processes that still run."""
        if self.group is None:
            return [p for pid, _ in self._reapers for p in _tree(pid) if p != pid]
        found: list[int] = []
        for where, _, _ in os.walk(self.group):
            with contextlib.suppress(OSError):
                found += map(int, Path(where, "cgroup.procs").read_text().split())
        return found

    def close(self) -> None:
        """Remove the group, after giving its processes 5 s to end."""
        if self.group is None:
            return
        deadline = time.monotonic() + 5
        while not _removed(self.group) and time.monotonic() < deadline:
            time.sleep(0.05)

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def ended_if_interrupted(
    process: "subprocess.Popen[bytes]", signum: int = signal.SIGKILL
) -> Iterator[None]:
    """End all processes when an error, Ctrl-C or SIGTERM ends the benchmark in this context."""
    try:
        yield
    except BaseException:
        kill_tree(process.pid, signum)
        process.wait()
        raise


def own_seconds(pid: int) -> float:
    """User plus system time of one process, without its children; 0 if it has ended."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def ended_children_cpu_seconds() -> float:
    """User plus system time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Memory(NamedTuple):
    """MB of one or more processes. `pss` divides a shared page among its processes, so that a sum is the
    memory that the host really uses; `rss` counts it in each process."""

    pss: float
    rss: float

    @classmethod
    def of(cls, pids: Iterable[int]) -> "Memory":
        found = [_rollup(pid) for pid in pids]
        return cls(sum(one.pss for one in found), sum(one.rss for one in found))


def _rollup(pid: int) -> Memory:
    kilobytes = {"Pss": 0, "Rss": 0}
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value = line.split()[:2]
            if name[:-1] in kilobytes:
                kilobytes[name[:-1]] = int(value)
    return Memory(kilobytes["Pss"] / 1024, kilobytes["Rss"] / 1024)


def command_of(pid: int) -> str:
    """Its command line, for reports; empty if it has ended."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return ""


def name_of(pid: int) -> str:
    """The process's own name; empty if it has ended."""
    return _status(pid).get("Name", "")


def parent_of(pid: int) -> int:
    """Its parent; 0 if it has ended."""
    return int(_status(pid).get("PPid", "0"))


def _status(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {}


# --- control groups ------------------------------------------------------------------------------


def _make_group(name: str) -> tuple[Path | None, Path | None]:
    """The group that we read, and the group that processes join (below it in v2)."""
    for base in (Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup/cpu,cpuacct")):
        with contextlib.suppress(OSError):
            group = base / _own_group("cpuacct").lstrip("/") / name
            group.mkdir()
            return group, group
    base = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        group = base / _own_group("").lstrip("/") / name
        if not (base / "cgroup.controllers").exists():
            return None, None
        group.mkdir()
        leaf = group / "main"
        leaf.mkdir()
        # Sandboxes create their groups below the first group that delegates controllers, which is ours.
        with contextlib.suppress(OSError):
            (group / "cgroup.subtree_control").write_text("+cpu +memory +pids")
        return group, leaf
    return None, None


def _own_group(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _group_seconds(group: Path) -> float:
    usage = group / "cpuacct.usage"
    if usage.exists():
        return int(usage.read_text()) / 1e9
    lines = (group / "cpu.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6


def _removed(group: Path) -> bool:
    for where, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(where)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


# --- /proc ---------------------------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _tree(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += parents.get(pid, [])
    return found


def _tree_seconds(root: int) -> float:
    """Running processes, and the CPU of the children that each has waited for."""
    return sum(map(_with_waited_for, _tree(root)))


def _with_waited_for(pid: int) -> float:
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / TICKS if fields else 0.0


def kill_tree(pid: int, signum: int = signal.SIGKILL) -> None:
    """Signal a process and all that it has started."""
    kill_all(_tree(pid), signum)


def kill_all(pids: Iterable[int], signum: int) -> None:
    """Signal every process that still runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
