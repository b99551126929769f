"""The time limit of a start. On a crowded host a start takes minutes, so only idle seconds count."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

LOOK_S = 1.0
IDLE_S = 120.0
"""Seconds in which no starting part computed, or waited for a core or a disk: then the start has failed."""
LONGEST_S = 1800.0
"""For a part that computes for ever."""


async def limited(
    start: Coroutine[Any, Any, None], works: Callable[[], bool], look_s: float = LOOK_S
) -> None:
    """Await `start`. `works`: whether a part that has not answered yet is at work.

    Raises: TimeoutError.
    """
    starting = asyncio.create_task(start)
    idle = 0.0
    try:
        for _ in range(int(LONGEST_S / look_s)):
            await asyncio.wait({starting}, timeout=look_s)
            if starting.done():
                return starting.result()
            idle = idle if works() else idle + look_s
            if idle >= IDLE_S:
                break
        raise TimeoutError
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
