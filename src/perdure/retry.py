"""Repeats a call while its failure passes: what Temporal cannot repeat, because it is a part of an activity
or happens outside of one."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


async def again(
    call: Callable[[], Awaitable[T]],
    errors: type[E] | tuple[type[E], ...],
    *,
    pauses: tuple[float, float],
    patience_s: float = math.inf,
    passes: Callable[[E], bool] = lambda error: True,
) -> T:
    """`pauses`: the first and the longest, doubled from try to try; an error's `retry_after` goes before. The
    last error is raised if it does not pass, or if its pause would end after `patience_s`."""
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
