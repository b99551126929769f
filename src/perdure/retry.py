"""Repeats a call while its errors are transient, for calls that Temporal cannot retry because they
are only a part of an activity or outside of one."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

ASK_AGAIN_S = 1800.0
"""Seconds until Perdure retries an account without credit: no API tells when credit arrives."""

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


async def retry_call(
    call: Callable[[], Awaitable[T]],
    errors: type[E] | tuple[type[E], ...],
    *,
    pauses: tuple[float, float],
    patience_s: float = math.inf,
    passes: Callable[[E], bool] = lambda error: True,
) -> T:
    """Repeat `call` until it succeeds.

    `pauses`: the first and the longest pause, doubled from try to try. An error's `retry_after`
    takes precedence. `passes`: whether an error is transient.
    Raises: an error that is not transient, or whose pause would end after `patience_s`.
    """
    end = time.monotonic() + patience_s
    pause, longest = pauses
    while True:
        try:
            return await call()
        except errors as error:
            wait = getattr(error, "retry_after", None) or pause * random.uniform(0.5, 1)
            if not passes(error) or time.monotonic() + wait > end:
                raise
        await asyncio.sleep(wait)
        pause = min(2 * pause, longest)
