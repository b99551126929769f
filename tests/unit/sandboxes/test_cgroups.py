"""Which cgroups a sandbox gets, decided from what the host offers; folders stand in for cgroupfs,
except in the last test."""

import os
from pathlib import Path

import pytest

from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.cgroups import Hierarchies, plan
from perdure.types import Limits

LIMITS = Limits(memory_mb=100, cpus=1.5, pids=32)
BOX = Path("/home/x/sandboxes/bubblewrap/one")


def test_v2_enforces_all_three(tmp_path: Path) -> None:
    """With delegated v2 controllers, one group has every limit and its children the commands."""
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
    """In hybrid mode, v1 has the limits and v2 the groups that can be killed as a whole."""
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


def test_a_host_with_a_quota_of_its_own_boots_sandboxes_under_it() -> None:
    """In a container of 0.2 cores, v1 refuses a higher quota, and the container's own applies."""
    above = Path(f"/sys/fs/cgroup/cpu/perdure-test-{os.getpid()}")
    if not (above.parent / cgroups.V1_QUOTA).exists() or not os.access(above.parent, os.W_OK):
        pytest.skip("no cgroup v1 to write to")
    found = Hierarchies(v1={"cpu": above})
    above.mkdir()
    made = plan(BOX, LIMITS, found)
    try:
        (above / cgroups.V1_QUOTA).write_text("20000")
        cgroups.make(made)
        quotas = [(folder / cgroups.V1_QUOTA).read_text().strip() for folder in made.folders]
    finally:
        for folder in (*made.folders, above):
            folder.rmdir()

    assert quotas == ["-1"]
