"""A run's deadline: which rollouts still fit before it, when agents are stopped, and how it
interrupts work."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine
from datetime import timedelta
from statistics import median
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.rollouts.activity_messages import Truncation
    from perdure.types import EpisodeRef, RolloutStatus, RunRequest

Result = TypeVar("Result")

CAPTURE_S = 30.0
"""Seconds to stop an agent and capture its diff, with a reserve for a busy host."""
DEFAULT_GRADE_S = 30.0
"""Seconds that a grading is assumed to take until one is recorded."""
LARGEST_MARGIN_SHARE = 0.1
"""Largest share of `deadline_s` that is reserved for captures and gradings."""
GRACE_PERIOD_S = 20.0
"""Seconds after the deadline until the run ends without the rollouts that are still open. These
store their patches and end by themselves."""
MANIFEST_S = 30.0
"""Seconds for the manifest after the deadline. If the store is down, the run ends without it."""


class RecordedTimes:
    """How long the run's rollouts took, from start to end, by instance. All have the same agent."""

    def __init__(self) -> None:
        self._by_instance: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, episode: EpisodeRef, *, only_grading: bool) -> None:
        """`only_grading`: the run only grades patches."""
        seconds = episode.grade_s if only_grading else episode.seconds
        whole = (RolloutStatus.GRADED, RolloutStatus.UNGRADED)
        if episode.status in whole and seconds > 0:
            self._by_instance[episode.instance_id].append(seconds)

    def expected_s(self, instance_id: str) -> float | None:
        """The median of the instance's rollouts, or else of all instances; None if none is known."""
        if own := self._by_instance.get(instance_id):
            return median(own)
        return median(map(median, self._by_instance.values())) if self._by_instance else None


def stop_margin_s(run: RunRequest, graded: int, grade_seconds: float) -> float:
    """Seconds before the deadline at which agents are stopped: enough to capture and grade."""
    each = grade_seconds / graded if graded and grade_seconds else DEFAULT_GRADE_S
    most = math.inf if run.deadline_s is None else LARGEST_MARGIN_SHARE * run.deadline_s
    return min(CAPTURE_S + 2 * each, most)


def stop_time(run: RunRequest, now: float, graded: int, grade_seconds: float) -> float | None:
    """When the agents are stopped (Unix seconds), as far as known `now`; None without a deadline."""
    if run.ends_at is None or run.deadline_s is None:
        return None
    earliest = run.ends_at - LARGEST_MARGIN_SHARE * run.deadline_s
    return earliest if now < earliest else run.ends_at - stop_margin_s(run, graded, grade_seconds)


def deadline_truncation(ends_at: float) -> Truncation:
    return Truncation(by="deadline", cause="the run's deadline", ends_at=ends_at)


def stop_at_truncation(run: RunRequest, ends_at: float) -> Truncation:
    """The end of a run whose `stop_at` is reached."""
    cause = f"the run's stop_at of {run.stop_at or 1:.4g}"
    return Truncation(by="stop_at", cause=cause, ends_at=min(ends_at, run.ends_at or math.inf))


async def run_until_truncated(
    work: Coroutine[Any, Any, Result], is_truncated: Callable[[], bool]
) -> Result | None:
    """Run `work`. Returns its result, or None if the run is truncated first."""
    task = asyncio.create_task(work)
    try:
        await workflow.wait_condition(lambda: task.done() or is_truncated())
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if task.done():
        return task.result()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()
    return None


async def wait_until(condition: Callable[[], bool], at: float, summary: str) -> bool:
    """Wait for the condition, at most until this time in Unix seconds. Returns whether it holds."""
    left = timedelta(seconds=max(0.0, at - workflow.time()))
    try:
        await workflow.wait_condition(condition, timeout=left, timeout_summary=summary)
    except TimeoutError:
        return condition()
    return True
