"""The time limit of a start. On a crowded host a start takes minutes, so we count only idle seconds."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

LOOK_S = 1.0
IDLE_S = 120.0
"""The start has failed after this many seconds in which no starting part used or waited for a core or a
disk."""
LONGEST_S = 1800.0
"""The limit for a part that computes forever."""


async def limited(
    start: Coroutine[Any, Any, None], works: Callable[[], bool], look_s: float = LOOK_S
) -> None:
    """Await `start`. `works` says whether a part that has not answered yet is working.

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
