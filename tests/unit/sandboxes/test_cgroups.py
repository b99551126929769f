"""Which cgroups a sandbox gets, decided from what the host offers; folders stand in for cgroupfs."""

from pathlib import Path

from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.cgroups import Hierarchies, plan
from perdure.types import Limits

LIMITS = Limits(memory_mb=100, cpus=1.5, pids=32)
BOX = Path("/home/x/sandboxes/bubblewrap/one")


def test_v2_enforces_all_three(tmp_path: Path) -> None:
    """With delegated v2 controllers one group holds every limit, its children the commands."""
    controllers = frozenset({"memory", "pids", "cpu"})
    made = plan(BOX, LIMITS, Hierarchies(v2=tmp_path, v2_controllers=controllers))
    box = tmp_path / cgroups.group_name(BOX)

    assert made.enforced == dict.fromkeys(("memory", "pids", "cpu"), "cgroup v2")
    assert (made.exec_groups, made.joins) == (box, ())
    assert dict(made.writes) == {
        box / "memory.max": str(100 << 20),
        box / "memory.swap.max": "0",
        box / "pids.max": "32",
        box / "cpu.max": "150000 100000",
    }


def test_v1_with_empty_v2_uses_both(tmp_path: Path) -> None:
    """In hybrid mode v1 holds the limits and v2 the groups that can be killed whole."""
    v1 = {name: tmp_path / name for name in ("memory", "pids", "cpu")}
    made = plan(BOX, LIMITS, Hierarchies(v1=v1, v2=tmp_path / "unified"))
    name = cgroups.group_name(BOX)

    assert made.enforced == dict.fromkeys(("memory", "pids", "cpu"), "cgroup v1")
    assert made.exec_groups == tmp_path / "unified" / name
    assert made.joins == tuple(v1[c] / name / "cgroup.procs" for c in ("memory", "pids", "cpu"))


def test_nothing_writable_enforces_nothing() -> None:
    """Without writable cgroups the plan is empty and claims to enforce nothing."""
    made = plan(BOX, LIMITS, Hierarchies())

    assert (made.folders, made.exec_groups, dict(made.enforced)) == ((), None, {})


def test_equal_identities_of_two_homes_differ() -> None:
    """The same identity in two homes of one host never shares a group."""
    other = Path("/home/y/sandboxes/bubblewrap/one")

    assert cgroups.group_name(BOX) != cgroups.group_name(other)
