"""When a run stops its agents before its deadline, and how long its next rollout may take."""

import pytest

from perdure.types import EpisodeRef, RolloutStatus, RunRequest
from workflows.run_deadline import RecordedTimes, stop_time


@pytest.mark.parametrize(
    ("deadline_s", "now", "graded", "grade_seconds", "before_s"),
    [
        (3600.0, 0.0, 0, 0.0, 360.0),  # the earliest moment: until then, more gradings are recorded
        (3600.0, 3500.0, 0, 0.0, 90.0),
        (3600.0, 3500.0, 10, 200.0, 70.0),
        (100.0, 95.0, 10, 200.0, 10.0),
    ],
)
def test_agents_stop_early_enough_for_their_gradings(
    deadline_s: float, now: float, graded: int, grade_seconds: float, before_s: float
) -> None:
    """A capture and two gradings by the run's own times, and at most a tenth of its time."""
    run = RunRequest(run_id="r", dataset="toy", deadline_s=deadline_s, ends_at=deadline_s)

    assert stop_time(run, now, graded, grade_seconds) == deadline_s - before_s


def episode(seconds: float, status: RolloutStatus = RolloutStatus.GRADED) -> EpisodeRef:
    return EpisodeRef(
        uri="", instance_id="a", sample_index=0, agent="nop", status=status, seconds=seconds
    )


def test_only_rollouts_with_a_verdict_say_how_long_one_takes() -> None:
    """One that failed at once would let rollouts begin that cannot end in time."""
    times = RecordedTimes()
    times.add(episode(1.0, RolloutStatus.FAILED), only_grading=False)
    before = times.expected_s("a")
    for seconds in (50.0, 70.0, 400.0):
        times.add(episode(seconds), only_grading=False)

    assert (before, times.expected_s("a"), times.expected_s("another")) == (None, 70.0, 70.0)
