"""The decorator that makes a method an activity: heartbeats, errors, logs, metrics, shutdown.

Only Temporal retries. `activity_errors` translates an error's type into what Temporal does next.
"""

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import structlog
from temporalio import activity

from activities.activity_errors import translated
from activities.heartbeats import STAGE, Beats, heartbeats
from perdure import tracing
from perdure.rollouts.activity_messages import WORKER_EVICTED
from perdure.telemetry import bind, metrics

log = structlog.get_logger("perdure.activity")

GRACE = timedelta(seconds=10)
"""How long a worker waits for its activities at shutdown before it cancels them. Activities hand
over at once, so this is only an upper limit, and a spot notice gives at least 30 s. Zero, which is
the SDK's default, is wrong with `leave_at_once`: temporalio 1.35 may never finish a shutdown if an
activity completes while the SDK cancels it (temporalio/sdk-rust#1537)."""

at_work: Counter[str] = Counter()
"""Number of activities that run in this process, by workflow id. Their heartbeats tell them when
their workflow is closed."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def shell(
    name: str, *, leave_at_once: bool = False, beats: Beats = STAGE
) -> Callable[
    [Callable[[Any, Argument], Awaitable[Result]]], Callable[[Any, Argument], Awaitable[Result]]
]:
    """Make a method the activity `name`.

    `leave_at_once`: hand over as soon as the worker is told to stop. Use it for activities that
    only watch. Others may use the worker's grace period to finish. `beats`: when it sends heartbeats.
    """

    def wrap(
        method: Callable[[Any, Argument], Awaitable[Result]],
    ) -> Callable[[Any, Argument], Awaitable[Result]]:
        @functools.wraps(method)
        async def run(self: Any, argument: Argument) -> Result:
            with _traced(name, argument), _observed(name, argument):
                async with heartbeats(beats), _interrupted_by_shutdown(leave_at_once):
                    return await translated(method(self, argument))

        return activity.defn(name=name)(run)

    return wrap


@contextlib.contextmanager
def _observed(name: str, argument: Any) -> Iterator[None]:
    """Log and count one try of a stage, with the id of its rollout."""
    info = activity.info()
    queued = (info.started_time - info.current_attempt_scheduled_time).total_seconds()
    started = time.monotonic()
    cause = ""
    workflow_id = info.workflow_id or ""
    at_work[workflow_id] += 1
    with _bound(argument):
        try:
            yield
        except BaseException as error:
            cause = getattr(error, "type", None) or type(error).__name__
            raise
        finally:
            at_work.subtract([workflow_id])
            if not at_work[workflow_id]:
                del at_work[workflow_id]
            seconds = time.monotonic() - started
            metrics.stage(name, seconds, queued, cause, info.attempt)
            level = log.warning if cause not in ("", WORKER_EVICTED) else log.info
            level("stage", stage=name, seconds=round(seconds, 3), try_=info.attempt, cause=cause)


@contextlib.contextmanager
def _traced(name: str, argument: Any) -> Iterator[None]:
    """Record a span for one try of a stage, and one for its wait for a free slot or seat."""
    info = activity.info()
    attributes: tracing.Attributes = {
        "perdure.workflow_id": info.workflow_id,
        "perdure.attempt": getattr(argument, "attempt", None),
        "temporal.try": info.attempt,
        "temporal.task_queue": info.task_queue,
    }
    tracing.past(f"wait for {name}", info.current_attempt_scheduled_time, info.started_time)
    with tracing.stage(name, attributes):
        yield


def _bound(argument: Any) -> contextlib.AbstractContextManager[None]:
    request = getattr(argument, "request", None)
    if request is None:
        return contextlib.nullcontext()
    number = int(getattr(argument, "attempt", 0) or getattr(argument, "attempts", 0))
    return bind(request.run_id, request.workflow_id, number)


@contextlib.asynccontextmanager
async def _interrupted_by_shutdown(at_once: bool) -> AsyncIterator[None]:
    """If `at_once`, cancel the work when the shutdown starts, not after the grace period."""
    if not at_once:
        yield
        return
    work = asyncio.current_task()
    assert work is not None
    task = asyncio.create_task(_cancel_at_shutdown(work))
    try:
        yield
    finally:
        task.cancel()


async def _cancel_at_shutdown(work: "asyncio.Task[Any]") -> None:
    await activity.wait_for_worker_shutdown()
    work.cancel()
