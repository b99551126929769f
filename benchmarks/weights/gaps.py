"""When each completion's tokens came, and the gaps between them.

A gateway answers only whole completions, so this reads those in flight every `LOOK_S` seconds.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from perdure.engines.pool.pool import EnginePool
from perdure.engines.pool.salvage import Salvage

LOOK_S = 0.002


class Gap(NamedTuple):
    """Seconds of the monotonic clock between two chunks of one completion."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def meets(self, start: float, end: float) -> bool:
        return self.start < end and self.end > start


@dataclass
class _Seen:
    salvage: Salvage
    """Kept alive, so that no other object gets its `id`."""
    tokens: int
    at: float
    gaps: list[Gap] = field(default_factory=list)


class Chunks:
    """The arrival of tokens in every completion of a pool, inside `watched`."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._seen: dict[int, _Seen] = {}

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator["Chunks"]:
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            for pooled in self._pool.engines.values():
                for call in pooled.running:
                    self._look(call.salvage, now)
            await asyncio.sleep(LOOK_S)

    def _look(self, salvage: Salvage, now: float) -> None:
        tokens = len(salvage.ids)
        seen = self._seen.get(id(salvage))
        if seen is None:
            self._seen[id(salvage)] = _Seen(salvage, tokens, now)
        elif tokens != seen.tokens:
            if seen.tokens:  # the time before the first token is no gap between chunks
                seen.gaps.append(Gap(seen.at, now))
            seen.tokens, seen.at = tokens, now

    def gaps(self, windows: Iterable[tuple[float, float]]) -> list[list[Gap]]:
        """For each completion with such gaps: its gaps that overlap one of these time windows."""
        spans = list(windows)
        found = (
            [gap for gap in seen.gaps if any(gap.meets(*span) for span in spans)]
            for seen in self._seen.values()
        )
        return [gaps for gaps in found if gaps]
