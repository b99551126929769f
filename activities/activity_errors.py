"""Translates Perdure's errors into Temporal's. The error type decides what happens next.

Temporal retries the activity after `RetryHere` and `OutcomeUnknown`. `SandboxLost` and `GiveUp` go
to the workflow. An unforeseen error is retried a few times and then reported as a bug.
"""

import asyncio
import errno
from collections.abc import Awaitable
from datetime import timedelta
from typing import TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.errors import (
    ConfigurationError,
    IdentityDiffers,
    OutcomeUnknown,
    PerdureError,
    RetryHere,
    SandboxLost,
)
from perdure.rollouts.activity_messages import WORKER_EVICTED

HOST_ERRNOS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO,
    errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
}  # fmt: skip
"""Errors that the host causes, not a stage: its disk is full or broken, or it lacks processes,
memory or file descriptors."""
NO_THREAD = "can't start new thread"
"""Python's words for EAGAIN where a thread was to start: a RuntimeError without an errno."""
ROOM_S = 10.0
"""Seconds before a retry after such an error. The number of retries is not limited."""
MAX_UNFORESEEN_ERROR_ATTEMPTS = 5
"""After this many tries with unforeseen errors, the rollout ends with the last one."""
MESSAGE_LIMIT = 1000
NAMED = (SandboxLost, IdentityDiffers, ConfigurationError)
"""Types that `retry_on` and a run's pause refer to by name. Their subclasses get the same name."""

Result = TypeVar("Result")


async def translated(work: Awaitable[Result]) -> Result:
    """Translate errors, so that their type tells Temporal what to do next."""
    try:
        return await work
    except asyncio.CancelledError:
        raise _of_cancellation() from None
    except PerdureError as error:
        raise _of_failure(error) from None  # the history needs the message, not the stack
    except ApplicationError:
        raise
    except Exception as error:
        if not _is_of_host(error):
            raise _of_bug(error) from error
        raise _of_failure(
            RetryHere(f"this host lacks resources: {error}", retry_after=ROOM_S)
        ) from None


def _is_of_host(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in HOST_ERRNOS
    return isinstance(error, RuntimeError) and NO_THREAD in str(error)


def _of_cancellation() -> BaseException:
    details = activity.cancellation_details()
    if details is None or details.worker_shutdown:  # None after `shell._cancel_at_shutdown`
        return ApplicationError(
            "the worker is shutting down; another worker continues",
            type=WORKER_EVICTED,
            non_retryable=True,
            category=ApplicationErrorCategory.BENIGN,
        )
    return asyncio.CancelledError()


def _of_failure(error: PerdureError) -> ApplicationError:
    retryable = isinstance(error, RetryHere | OutcomeUnknown)
    after = getattr(error, "retry_after", None)
    kind = next((known for known in NAMED if isinstance(error, known)), type(error))
    return ApplicationError(
        str(error)[:MESSAGE_LIMIT],
        error.boundary.value,
        type=kind.__name__,
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
        non_retryable=activity.info().attempt >= MAX_UNFORESEEN_ERROR_ATTEMPTS,
    )
