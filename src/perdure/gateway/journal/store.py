"""The journal in the store: an answer waits until the store has its record.

Gateways on any hosts share it; parallel turns of a session share a part. `parts` says what a
part is, and which of two writers wins.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from perdure.errors import ConfigurationError, GatewayUnavailable, StoreUnavailable
from perdure.gateway.journal.appends import Append, accept, overtaken, resolve, to_append
from perdure.gateway.journal.encoding import JournalDamaged
from perdure.gateway.journal.parts import Parts

KEPT = 8192
"""Sessions whose length is remembered; for any other the parts are listed first."""


@dataclass
class _Held:
    """What this process knows of a session. `records` None: read before writing."""

    records: int | None = None
    queue: list[Append] = field(default_factory=list)
    writing: "asyncio.Task[None] | None" = None


class StoreJournal:
    """`adopt` is awaited on the first read of a session: it uploads what only this host's disk has."""

    def __init__(self, parts: Parts, adopt: Callable[[str], Awaitable[None]] | None = None) -> None:
        self._parts = parts
        self._adopt = adopt
        self._sessions: OrderedDict[str, _Held] = OrderedDict()

    async def read(self, session_id: str, after: int = 0) -> list[dict[str, Any]]:
        """The records from number `after` on. Raises: JournalDamaged, StoreUnavailable."""
        held = self._hold(session_id)
        if held.records is None and self._adopt is not None:
            await self._adopt(session_id)
        if held.records == after > 0 and not await self._parts.has(session_id, after):
            return []  # each turn asks this before it samples: one request instead of a listing
        records = await self._parts.read(session_id, after)
        if records or after == 0:
            held.records = max(held.records or 0, after + len(records))
        return records

    async def append(self, session_id: str, record: dict[str, Any], *, position: int) -> None:
        """Returns when the store has it.

        Raises: Overtaken, GatewayUnavailable (the store did not answer; if it has the record all the
        same, the next append at `position` raises Overtaken), JournalDamaged, ConfigurationError.
        """
        held = self._hold(session_id)
        item = to_append(session_id, position, record)
        held.queue.append(item)
        if held.writing is None:
            held.writing = asyncio.create_task(self._write(session_id, held))
        await item.done

    async def aclose(self) -> None:
        """Write what is queued."""
        writing = [held.writing for held in self._sessions.values() if held.writing is not None]
        await asyncio.gather(*writing)

    def _hold(self, session_id: str) -> _Held:
        held = self._sessions.setdefault(session_id, _Held())
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > KEPT:
            oldest = next(iter(self._sessions))
            if self._sessions[oldest].writing is None:
                del self._sessions[oldest]
        return held

    async def _write(self, session_id: str, held: _Held) -> None:
        try:
            while held.queue:
                batch, held.queue = held.queue, []
                try:
                    await self._put(session_id, held, batch)
                except Exception as error:
                    held.records = None  # it may have been written: read before the next one
                    resolve(batch, _told(error))
        finally:
            held.writing = None

    async def _put(self, session_id: str, held: _Held, batch: list[Append]) -> None:
        if held.records is None:
            held.records = len(await self._parts.read(session_id))
        accepted = accept(batch, held.records)
        if not accepted:
            return
        if await self._parts.put(session_id, held.records, [item.data for item in accepted]):
            held.records += len(accepted)
            resolve(accepted, None)
        else:
            first, held.records = held.records, None
            resolve(accepted, overtaken(session_id, first))


def _told(error: Exception) -> Exception:
    if isinstance(error, StoreUnavailable):
        told = GatewayUnavailable(f"the journal cannot be written: {error}")
        told.__cause__ = error
        return told
    if isinstance(error, (ConfigurationError, JournalDamaged)):
        return error
    return GatewayUnavailable(f"the journal cannot be written: {error!r}")
