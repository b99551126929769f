"""Repeats a call while its errors are transient. For calls that Temporal cannot repeat, because they are a
part of an activity or happen outside of one."""

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
    """`pauses`: the first and the longest, doubled from try to try; an error's `retry_after` takes precedence.
    `passes`: whether an error is transient. Raises: the error that is not, or whose pause would end after
    `patience_s`."""
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
