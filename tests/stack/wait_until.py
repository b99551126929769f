"""Waiting for what a test expects, with bounds that only something broken reaches."""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

PAUSE_S = 0.02
SERVER_PAUSE_S = 0.1
"""Between two questions to a server. Each takes milliseconds of CPU time from it and from the test."""
PATIENCE_S = 180.0
"""Only what is broken takes this long; nothing waits for the clock. Less than a test's time limit."""
LINGERS_S = 60.0
"""Seconds that an ended process may stay visible on a busy host."""
LOOK_AGAIN_S = 0.25
"""Between two looks for what is left: a look over a whole host takes the time of those who clean up."""


async def until(
    condition: Callable[[], Any],
    what: str,
    limit_s: float = PATIENCE_S,
    pause_s: float = SERVER_PAUSE_S,
) -> Any:
    """Ask again until the answer, awaited where it must be, is truthy; then return it.

    `pause_s`: between two questions whose answers are awaited. For a state that does not last,
    `PAUSE_S`.
    """
    end = time.monotonic() + limit_s
    while True:
        pause = PAUSE_S
        answer = condition()
        if inspect.isawaitable(answer):
            answer, pause = await answer, pause_s
        if answer:
            return answer
        assert time.monotonic() < end, f"still not so after {limit_s:g} s: {what}"
        await asyncio.sleep(pause)


async def nothing(look: Callable[[], Sequence[Any]], limit_s: float = LINGERS_S) -> None:
    """Look again until nothing is found. Raises AssertionError with what is there at last."""
    end = time.monotonic() + limit_s
    while found := look():
        assert time.monotonic() < end, f"still there after {limit_s:g} s: {found}"
        await asyncio.sleep(LOOK_AGAIN_S)
