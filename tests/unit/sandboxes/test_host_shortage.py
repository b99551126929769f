"""Whether the host, or the sandbox's own limit, refused a process or memory: read from cgroup files."""

from pathlib import Path

import pytest

from perdure.sandboxes.host.host_shortage import Refusals

V1 = {"memory_oom_control": "under_oom 0\noom_kill 1", "memory_limit_in_bytes": "67108864"}


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text + "\n")


def lacked(folder: Path, **files: str) -> str:
    """The shortage that is reported once these files have changed."""
    before = Refusals.of([str(folder)])
    write(folder, **files)
    return Refusals.of([str(folder)]).shortage(before, [str(folder)])


@pytest.mark.parametrize(
    ("peak", "found"), [("40", "processes"), ("100", "")], ids=["below its limit", "at its limit"]
)
def test_a_refused_fork_is_the_hosts_below_the_own_limit(
    tmp_path: Path, peak: str, found: str
) -> None:
    """cgroup v1 counts it in the sandbox's group, whichever group's limit refused it."""
    box = tmp_path / "box"
    write(box, pids_events="max 0", pids_max="100", pids_peak="12")

    assert lacked(box, pids_events="max 3", pids_peak=peak) == found


def test_an_old_kernel_that_does_not_tell_blames_the_sandbox(tmp_path: Path) -> None:
    """Before Linux 6.1 there is no peak. Otherwise a fork bomb could discard its episode."""
    box = tmp_path / "box"
    write(box, pids_events="max 0", pids_max="100")

    assert lacked(box, pids_events="max 3") == ""


def test_a_refusal_of_a_group_above_is_the_hosts(tmp_path: Path) -> None:
    """cgroup v2 counts it in the group with the limit. Refusals of groups below do not count."""
    box = tmp_path / "slice" / "box"
    write(box, pids_events="max 0", pids_max="100", pids_peak="9")
    write(box.parent, pids_events="max 5")
    (box.parent / "pids.events.local").write_text("max 0\n")
    before = Refusals.of([str(box)])
    write(box.parent, pids_events="max 9")
    below = Refusals.of([str(box)]).shortage(before, [str(box)])
    (box.parent / "pids.events.local").write_text("max 1\n")
    above = Refusals.of([str(box)]).shortage(before, [str(box)])

    assert (below, above) == ("", "processes")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"memory_events": "oom 0\noom_kill 1"}, "memory"),
        ({"memory_events": "oom 1\noom_kill 1"}, ""),
        ({**V1, "memory_max_usage_in_bytes": "30000000"}, "memory"),
        ({**V1, "memory_max_usage_in_bytes": "67000000"}, ""),
    ],
    ids=["v2, the host", "v2, its own", "v1, the host", "v1, its own"],
)
def test_a_process_killed_below_the_own_memory_is_the_hosts(
    tmp_path: Path, files: dict[str, str], found: str
) -> None:
    """The kernel killed it for lack of memory, although the sandbox had not used up its own."""
    box = tmp_path / "box"
    write(box)

    assert lacked(box, **files) == found


def test_a_count_survives_its_record() -> None:
    """The count written with a command is read back, also by another worker."""
    assert Refusals.parse(str(Refusals(1, 2, 3))) == Refusals(1, 2, 3)
