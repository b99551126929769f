"""The seats of a home limit its agents' sandboxes over all its worker processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from perdure.rollouts.admission import host_seats as module
from perdure.rollouts.admission.host_seats import LAPSES_S, Seats

TWO = 2
HOLDS = """
import sys
from pathlib import Path
from perdure.rollouts.admission.host_seats import Seats
held = Seats(Path(sys.argv[1]), 2).reserve()
print("reserved", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def seats(tmp_path: Path) -> Seats:
    return Seats(tmp_path / "seats", TWO)


def test_a_full_home_has_no_seat(seats: Seats) -> None:
    """Reserved and taken seats count alike, whichever worker process asks."""
    seats.take("p-1-agent-1")
    reserved = Seats(seats.folder, TWO).reserve()

    assert (reserved is not None, seats.reserve()) == (True, None)


def test_a_released_seat_is_free(seats: Seats) -> None:
    """A seat whose sandbox is gone is free too."""
    for name in ("p-1-agent-1", "p-2-agent-1"):
        seats.take(name)
    assert seats.reserve() is None
    seats.leave("p-1-agent-1")
    again = seats.reserve()
    assert again is not None
    again.release()

    assert seats.reserve() is not None


def test_a_full_home_is_not_searched_again(seats: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of seats a check is expensive, so none happens until a seat is released or may
    have lapsed."""
    looks: list[str] = []

    def is_held(path: Path) -> bool:
        looks.append(path.name)
        return True

    for name in ("p-1-agent-1", "p-2-agent-1"):
        seats.take(name)
    assert seats.reserve() is None
    os.utime(seats.folder, (1, 1))  # it last changed long ago
    monkeypatch.setattr(seats, "_is_held", is_held)
    for _ in range(5):
        assert seats.reserve() is None
    monkeypatch.setattr(module, "LAPSED_LOOK_S", 0.0)
    assert seats.reserve() is None
    searched = len(looks)
    seats.leave("p-1-agent-1")

    assert (searched, seats.reserve() is not None) == (2 * TWO, True)


def test_a_renewed_seat_is_one_seat(seats: Seats) -> None:
    """A watcher renews the same seat repeatedly."""
    for _ in range(3):
        seats.take("p-1-agent-1")

    assert seats.taken() == 1


def test_a_seat_that_nobody_renews_is_free(seats: Seats) -> None:
    """The worker died between the boot and its answer, and the seat is not lost forever."""
    seats.take("p-1-agent-1")
    _last_renewed(seats, "p-1-agent-1", monotonic() - LAPSES_S)

    assert seats.taken() == 0


def test_a_seat_of_before_the_reboot_is_free(seats: Seats) -> None:
    """The monotonic clock has started again."""
    seats.take("p-1-agent-1")
    _last_renewed(seats, "p-1-agent-1", monotonic() + 1000)

    assert seats.taken() == 0


def test_a_worker_that_comes_back_keeps_the_seats(seats: Seats) -> None:
    """The watchers get time to renew their seats."""
    seats.take("p-1-agent-1")
    _last_renewed(seats, "p-1-agent-1", monotonic() - LAPSES_S)
    seats.keep()

    assert seats.taken() == 1


def test_a_killed_process_leaves_its_reservation(seats: Seats) -> None:
    """After kill -9 during a boot, the reserved seat is free at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(seats.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reserved\n"
        assert seats.taken() == 1
        process.send_signal(signal.SIGKILL)

    assert seats.taken() == 0


def _last_renewed(seats: Seats, name: str, when: float) -> None:
    os.utime(seats.folder / name, (when, when))


def test_a_reserved_seat_has_no_agent(seats: Seats) -> None:
    """A worker reserves a seat before it polls for a rollout, which may never come."""
    reservation = seats.reserve()
    seats.take("a-sandbox")

    assert reservation is not None
    assert (seats.taken(), seats.agents()) == (2, 1)
