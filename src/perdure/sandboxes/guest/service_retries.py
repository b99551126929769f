"""Repeats calls to a sandbox service that fail for a transient reason.

The sandbox's identity and the guest's records make every call safe to repeat. Each provider maps
its service's errors to those of Perdure in a module of its own.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from perdure import retry
from perdure.errors import (
    AccountExhausted,
    ControlPlaneError,
    PerdureError,
    RateLimited,
    SandboxLost,
)

T = TypeVar("T")

PAUSE_S = (0.1, 8.0)
"""The first and the longest pause between two calls."""
PATIENCE_S = 45.0
"""Seconds after which it gives up. Then Temporal retries, at longer intervals."""
READS_LAG_S = 2.0
"""Seconds until a service's reads show what it has created."""


class Conflict(PerdureError):
    """409: another request has taken the identity, or is about to."""


class Missing(PerdureError):
    """404 or the like. The caller knows whether the sandbox or only a path is missing."""


async def retry_transient(
    call: Callable[[], Awaitable[T]], *, patience_s: float = PATIENCE_S, wait_at_caps: bool = True
) -> T:
    """Repeat while the failure is transient. `wait_at_caps`: RateLimited counts as transient, except
    AccountExhausted."""
    final = AccountExhausted if wait_at_caps else RateLimited
    return await retry.retry_call(
        call,
        ControlPlaneError,
        pauses=PAUSE_S,
        patience_s=patience_s,
        passes=lambda error: not isinstance(error, final),
    )


async def cancellable(call: Callable[[], Awaitable[T]]) -> T:
    """The result of the call. A cancellation is raised even if the SDK swallows it, as E2B's transport
    does in about one of five calls: the cancelled task would go on."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await call()
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


async def recheck_missing(look: Callable[[], Awaitable[T]]) -> T:
    """Look again after a 404: a service's reads lag behind its creates.

    Raises: Missing.
    """
    try:
        return await look()
    except Missing:
        await asyncio.sleep(READS_LAG_S)
    return await look()


def was_refused(error: PerdureError) -> bool:
    """Whether the service or a proxy said when to retry. That says nothing about the sandbox, and
    any earlier request would be refused too."""
    return isinstance(error, ControlPlaneError) and error.retry_after is not None


def retry_after(headers: Mapping[str, Any]) -> float | None:
    """Seconds, from `Retry-After` or `Retry-After-<throttler>`. Either may hold a date."""
    for name, value in headers.items():
        if name.lower().startswith("retry-after"):
            text = str(value).strip()
            if re.fullmatch(r"\d+(\.\d+)?", text):
                return float(text)
            try:
                return max(1.0, parsedate_to_datetime(text).timestamp() - time.time())
            except ValueError:
                return None
    return None


class Silences:
    """Since when sandboxes that their service reports as running have not answered."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def broken(self, sandbox_id: str) -> None:
        self._since.pop(sandbox_id, None)

    def lasts(self, sandbox_id: str) -> float:
        """Seconds of silence; the first call for a sandbox starts the clock."""
        now = time.monotonic()
        return now - self._since.setdefault(sandbox_id, now)


def sandbox_lost_error(service: str, identity: str, why: object = "") -> SandboxLost:
    return SandboxLost(f"{service} sandbox {identity!r} is gone; boot a new one {why}".strip())
