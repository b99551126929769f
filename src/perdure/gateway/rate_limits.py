"""Limits a session's calls and sampled tokens per minute; calls above the limit wait."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True)
class Ceilings:
    """Limits of one session in one gateway process, per minute."""

    calls: int = 1_200
    tokens: int = 400_000
    """Sampled tokens."""


DEFAULT_CEILINGS = Ceilings()


class Pace:
    """Two token buckets, one for calls and one for sampled tokens, that hold one minute's worth each.

    A call's tokens are known only when it has ended. They may leave a debt, and later calls wait until
    it is refilled.
    """

    def __init__(
        self,
        ceilings: Ceilings = DEFAULT_CEILINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ceilings = ceilings
        self._clock = clock
        self._calls, self._tokens = float(ceilings.calls), float(ceilings.tokens)
        self._at = clock()

    def wait_s(self) -> float:
        """Seconds until a call may start; 0 if it may start now."""
        self._refill()
        calls, tokens = self._ceilings.calls, self._ceilings.tokens
        return MINUTE_S * max(0.0, (1 - self._calls) / calls, (1 - self._tokens) / tokens)

    async def turn(self) -> None:
        """Wait until a call may start, and count it."""
        while (wait_s := self.wait_s()) > 0:
            await asyncio.sleep(wait_s)
        self._calls -= 1

    def sampled(self, tokens: int) -> None:
        self._tokens -= tokens

    def _refill(self) -> None:
        now, ceilings = self._clock(), self._ceilings
        share = (now - self._at) / MINUTE_S
        self._at = now
        self._calls = min(ceilings.calls, self._calls + share * ceilings.calls)
        self._tokens = min(ceilings.tokens, self._tokens + share * ceilings.tokens)
