"""The batches of this process, under consecutive numbers. Each is written only if its number is free.

If a number is taken, another process wrote there, or this process did and the answer was lost. The
process reads what is there before it tries the next number. So it cannot write past a release that
it has not seen.
"""

import asyncio
import time
from collections.abc import Callable

from perdure.errors import StoreUnavailable
from perdure.gateway.journal.batches.entry import Entry, decode, encode_skip
from perdure.storage import keys
from perdure.storage.base import Store

PATIENCE_S = 10.0
"""Seconds for which a write is repeated. Then its calls wait, and each tries again by itself."""
PAUSE_S = 0.2


class OwnBatches:
    """`learn` is called with each entry that was found under a number that this process wanted."""

    def __init__(
        self,
        store: Store,
        writer: str,
        learn: Callable[[int, Entry], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.writer = writer
        self.unsure = False
        """Whether the last write may have happened without an answer."""
        self._store = store
        self._learn = learn
        self._patience_s = patience_s
        self._last = 0
        self._writing = asyncio.Lock()

    async def write(self, make: Callable[[int], bytes | None]) -> int | None:
        """Write what `make` returns for a number. Returns the number, or None if `make` had nothing.

        `make` is called again after each entry that was learned. Raises: ConfigurationError;
        StoreUnavailable, after which `unsure` says that the batch may have been written.
        """
        async with self._writing:
            return await self._write(make)

    async def settle(self) -> None:
        """Find out whether the last write happened. Raises: as `write`."""
        async with self._writing:
            if self.unsure:
                await self._write(lambda number: encode_skip())

    async def _write(self, make: Callable[[int], bytes | None]) -> int | None:
        give_up = time.monotonic() + self._patience_s
        number = self._last + 1
        data = make(number)
        while data is not None:
            try:
                there = await self._put(number, data)
            except StoreUnavailable:
                self.unsure = True
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(PAUSE_S)
                continue
            self._last, self.unsure = number, False
            if there == data:
                return number
            self._learn(number, decode(number, there, self._key(number)))
            number += 1
            data = make(number)
        return None

    async def _put(self, number: int, data: bytes) -> bytes:
        """What the number holds now."""
        key = self._key(number)
        if await self._store.put_if_absent(key, data):
            return data
        return (await self._store.get(key)).data

    def _key(self, number: int) -> str:
        return keys.journal_batch(self.writer, number)
