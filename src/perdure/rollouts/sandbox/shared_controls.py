"""Shares the results of controls among the rollouts of a process that need one at the same time."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable


class SharedControls:
    """One control at a time for each key. Callers that wait for it share the next one's result."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._last: dict[str, tuple[float, bool]] = {}
        """When the last one began, and whether it succeeded."""

    async def succeeds(self, key: str, control: Callable[[], Awaitable[bool]]) -> bool:
        """The result of a control that began after this call."""
        asked = time.monotonic()
        async with self._locks[key]:
            began, succeeded = self._last.get(key, (0.0, False))
            if began < asked:
                began = time.monotonic()
                succeeded = await control()
                self._last[key] = began, succeeded
            return succeeded
