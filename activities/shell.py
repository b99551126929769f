"""What every activity shares: heartbeats, hand-over at a spot notice, error types for Temporal.

Temporal retries, and only Temporal. An error's type says what happens next: `RetryHere` and
`OutcomeUnknown` repeat this activity, `SandboxLost` and `GiveUp` go to the workflow, a bug is
repeated a few times and then reported.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.errors import OutcomeUnknown, PerdureError, RetryHere
from perdure.rollouts.messages import WORKER_EVICTED
from perdure.telemetry import bind, metrics

log = structlog.get_logger("perdure.activity")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

BUG_TRIES = 5
"""Tries of an activity that fails with an unforeseen error, before the rollout ends with it."""
MESSAGE_LIMIT = 1000

FIRST_BEAT_S = 1.0
"""An activity that ends sooner costs the server no heartbeat at all."""
LATER_BEATS_S = 5.0


def shell(
    name: str, *, leave_at_once: bool = False
) -> Callable[
    [Callable[[Any, Argument], Awaitable[Result]]], Callable[[Any, Argument], Awaitable[Result]]
]:
    """Make a method the activity `name`.

    `leave_at_once`: hand over as soon as the worker is told to stop, for work that only watches.
    Other work may use the worker's grace period to finish.
    """

    def wrap(
        method: Callable[[Any, Argument], Awaitable[Result]],
    ) -> Callable[[Any, Argument], Awaitable[Result]]:
        @functools.wraps(method)
        async def run(self: Any, argument: Argument) -> Result:
            _progress.set({})
            with _observed(name, argument):
                async with _heartbeats(), _interrupted_by_shutdown(leave_at_once):
                    return await _translated(method(self, argument))

        return activity.defn(name=name)(run)

    return wrap


async def _translated(work: Awaitable[Result]) -> Result:
    """Translate errors, so that Temporal knows from the type what to do next."""
    try:
        return await work
    except asyncio.CancelledError:
        raise _of_cancellation() from None
    except PerdureError as error:
        raise _of_failure(error) from None  # the message says it all; no stack in the history
    except ApplicationError:
        raise
    except Exception as error:
        raise _of_bug(error) from error


@contextlib.contextmanager
def _observed(name: str, argument: Any) -> Iterator[None]:
    """Log and count one try of one stage, with the rollout it belongs to."""
    info = activity.info()
    queued = (info.started_time - info.current_attempt_scheduled_time).total_seconds()
    started = time.monotonic()
    cause = ""
    with _bound(argument):
        try:
            yield
        except BaseException as error:
            cause = getattr(error, "type", None) or type(error).__name__
            raise
        finally:
            seconds = time.monotonic() - started
            metrics.stage(name, seconds, queued, cause)
            level = log.warning if cause not in ("", WORKER_EVICTED) else log.info
            level("stage", stage=name, seconds=round(seconds, 3), try_=info.attempt, cause=cause)


def _bound(argument: Any) -> contextlib.AbstractContextManager[None]:
    request = getattr(argument, "request", None)
    if request is None:
        return contextlib.nullcontext()
    number = int(getattr(argument, "attempt", 0) or getattr(argument, "attempts", 0))
    return bind(request.run_id, request.workflow_id, number)


@contextlib.asynccontextmanager
async def _heartbeats() -> AsyncIterator[None]:
    """Send heartbeats at a third of the time-out: they also bring cancellations back."""
    timeout = activity.info().heartbeat_timeout
    if timeout is None:
        yield
        return
    task = asyncio.create_task(_beat(timeout.total_seconds() / 3))
    try:
        yield
    finally:
        task.cancel()


async def _beat(interval: float) -> None:
    pause = min(interval, FIRST_BEAT_S)
    while True:
        await asyncio.sleep(pause)
        progress = _progress.get()
        activity.heartbeat(*([progress] if progress else []))
        pause = min(interval, LATER_BEATS_S)


@contextlib.asynccontextmanager
async def _interrupted_by_shutdown(at_once: bool) -> AsyncIterator[None]:
    """If `at_once`, cancel the work when the shutdown starts, not when the grace period is over."""
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


_progress: ContextVar[dict[str, Any]] = ContextVar("progress")


def report(**progress: Any) -> None:
    """Show this beside the pending activity in the Web UI with the next heartbeat. Keep it tiny."""
    _progress.get().update(progress)


def _of_cancellation() -> BaseException:
    details = activity.cancellation_details()
    if details is None or details.worker_shutdown:  # None: `_cancel_at_shutdown` cancelled it
        return ApplicationError(
            "the worker was told to stop; the work goes on elsewhere",
            type=WORKER_EVICTED,
            non_retryable=True,
            category=ApplicationErrorCategory.BENIGN,
        )
    return asyncio.CancelledError()


def _of_failure(error: PerdureError) -> ApplicationError:
    retryable = isinstance(error, RetryHere | OutcomeUnknown)
    after = getattr(error, "retry_after", None)
    return ApplicationError(
        str(error)[:MESSAGE_LIMIT],
        error.boundary.value,
        type=type(error).__name__,
        non_retryable=not retryable,
        next_retry_delay=timedelta(seconds=after) if after is not None else None,
        category=ApplicationErrorCategory.BENIGN
        if not retryable
        else ApplicationErrorCategory.UNSPECIFIED,
    )


def _of_bug(error: Exception) -> ApplicationError:
    return ApplicationError(
        f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT],
        type="UnexpectedError",
        non_retryable=activity.info().attempt >= BUG_TRIES,
    )
