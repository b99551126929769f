"""A sandbox's folder keeps time by the monotonic clock, which cannot be set."""

import resource
import time
from pathlib import Path

import pytest

from perdure.sandboxes.host.sandbox_folder import (
    DRAFT,
    SandboxFolder,
    SandboxMeta,
    age_of,
    timestamped_name,
)
from perdure.sandboxes.host.sandbox_folder import META as META_FILE

META = SandboxMeta("p", "one", 0.0, "/", {}, {}, 1, 1)


JUMPS = pytest.mark.parametrize("jump", [7200, -7200], ids=["forward", "back"])


def _set_clock(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + jump)


@JUMPS
@pytest.mark.parametrize("renewed", [False, True])
def test_its_deadline_stays_as_far_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renewed: bool, jump: float
) -> None:
    """When the wall clock is moved by two hours, the sandbox's remaining time does not change."""
    box = SandboxFolder(tmp_path / "one")
    box.create_folder(META, 600)
    if renewed:
        box.extend(600)
    _set_clock(monkeypatch, jump)

    assert box.expires() - time.time() == pytest.approx(600, abs=60)


def test_a_folder_that_a_power_cut_emptied_is_a_dead_sandbox(tmp_path: Path) -> None:
    """It can be listed and removed, like a sandbox whose processes have ended."""
    box = SandboxFolder(tmp_path / "one")
    box.create_folder(META, 60)
    (box.path / META_FILE).write_bytes(b"")

    assert (box.meta().identity, box.alive) == ("one", False)


def test_a_deadline_moves_on_a_full_disk(tmp_path: Path) -> None:
    """A sandbox can be renewed while the disk is full, because that writes no byte."""
    box = SandboxFolder(tmp_path / "one")
    box.create_folder(META, 60)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        box.extend(600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert box.expires() - time.time() == pytest.approx(600, abs=60)


@JUMPS
def test_what_is_being_made_is_young(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """No other process removes the draft of a sandbox as a leftover when the clock is set."""
    name = timestamped_name(DRAFT)
    _set_clock(monkeypatch, jump)

    assert age_of(name, DRAFT) < 60


@pytest.mark.parametrize(
    "name",
    [f"{DRAFT}{time.monotonic() + 1e6:.0f}-x", f"{DRAFT}x"],
    ids=["later than now", "without a time"],
)
def test_what_an_earlier_start_of_the_machine_left_is_old(name: str) -> None:
    """The monotonic clock restarts at boot, so a time in the future is from an earlier boot."""
    assert age_of(name, DRAFT) == float("inf")
