"""Calls of a service that makes sandboxes elsewhere: passing failures are tried again.

Only calls that may be repeated come here: the sandbox's identity and the guest's records make all
of ours so. How a service's failures are typed is said beside its provider.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.errors import ControlPlaneError, PerdureError, RateLimited, SandboxLost

T = TypeVar("T")

PAUSE_S = (0.1, 8.0)
PATIENCE_S = 45.0
"""No further try after this long; then Temporal's retries, which are slower, take over."""
READS_LAG_S = 2.0
"""What a service made is seen by its own reads after so long."""


class Conflict(PerdureError):
    """409: the identity is taken by another request, or by one in progress."""


class Missing(PerdureError):
    """404 or its like: of the sandbox perhaps, of a path perhaps; the caller knows more."""


async def again(
    call: Callable[[], Awaitable[T]], *, patience_s: float = PATIENCE_S, at_caps: bool = True
) -> T:
    """Repeat while the failure is a passing one. `at_caps`: RateLimited counts as one."""
    end = time.monotonic() + patience_s
    pause, longest = PAUSE_S
    while True:
        try:
            return await call()
        except ControlPlaneError as error:
            if isinstance(error, RateLimited) and not at_caps:
                raise
            wait = error.retry_after or pause * random.uniform(0.5, 1)
            if time.monotonic() + wait > end:
                raise
        await asyncio.sleep(wait)
        pause = min(pause * 2, longest)


async def passing(refusal: type[Conflict | Missing], call: Callable[[], Awaitable[T]]) -> T:
    """Where such a refusal is only of the moment. A list is never missing: a proxy said so."""
    try:
        return await call()
    except refusal as error:
        raise ControlPlaneError(str(error)) from error


async def confirmed(look: Callable[[], Awaitable[T]]) -> T:
    """A look whose 404 counts when it comes twice: reads of a service lag behind its creates.

    Raises: Missing.
    """
    try:
        return await look()
    except Missing:
        await asyncio.sleep(READS_LAG_S)
    return await look()


def was_refused(error: PerdureError) -> bool:
    """Somebody on the way said when to come back: it tells nothing about the sandbox, and whoever
    asks anything else sooner is refused as well."""
    return isinstance(error, ControlPlaneError) and error.retry_after is not None


class Silences:
    """Since when sandboxes that their service calls running have not answered."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def broken(self, sandbox_id: str) -> None:
        self._since.pop(sandbox_id, None)

    def lasts(self, sandbox_id: str) -> float:
        """Seconds; the first call begins it."""
        now = time.monotonic()
        return now - self._since.setdefault(sandbox_id, now)


def lost(service: str, identity: str, why: object = "") -> SandboxLost:
    return SandboxLost(
        f"{service} sandbox {identity!r} is gone; boot a new generation {why}".strip()
    )
