"""Decides from regular checks whether a part of the stack hangs."""

from collections.abc import Awaitable, Callable

HANGS_AFTER = 6
"""A part hangs when it fails this many checks in a row."""
STARTS_WITHIN = 18
"""The same for a part that has not answered since its start: on a busy host imports take long."""


class Watch:
    """The checks of one part; its process may change between two checks."""

    def __init__(self, check: Callable[[], Awaitable[bool]], started: int) -> None:
        """`started`: the pid of the process that answered during the start of the stack."""
        self._check = check
        self._pid = started
        self._answered = True
        self._failed = 0

    async def hangs(self, pid: int) -> bool:
        """Check once. True: process `pid` must be restarted."""
        if pid != self._pid:
            self._pid, self._answered, self._failed = pid, False, 0
        if await self._check():
            self._answered, self._failed = True, 0
            return False
        self._failed += 1
        return self._failed >= (HANGS_AFTER if self._answered else STARTS_WITHIN)
