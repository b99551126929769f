"""How many calls and sampled tokens a session may have a minute; what is over them waits."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True)
class Ceilings:
    """Of one session in one gateway process, per minute."""

    calls: int = 1_200
    tokens: int = 400_000
    """Sampled tokens."""


DEFAULT_CEILINGS = Ceilings()


class Pace:
    """Two allowances that refill steadily and hold one minute's worth each.

    Tokens are known only when a call has ended: they may leave a debt, which later calls wait for.
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
        """Seconds until a call may start; 0: at once."""
        self._refill()
        calls, tokens = self._ceilings.calls, self._ceilings.tokens
        return MINUTE_S * max(0.0, (1 - self._calls) / calls, (1 - self._tokens) / tokens)

    async def turn(self) -> None:
        """Return when a call may start, and count it."""
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
