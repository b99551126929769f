"""The journal in the store: a turn is answered when the store has its record.

Turns of all sessions that wait at the same time share one object, a batch of this process
(`batches.own`). A session belongs to one process at a time (`batches.claims`); any other process
takes it over when it gets one of its calls (`batches.takeover`). This host's disk keeps nothing.
"""

import asyncio
import uuid
from collections.abc import Sequence

from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound, StoreUnavailable
from perdure.gateway.journal.appends import Append, resolve, to_append
from perdure.gateway.journal.base import Overtaken
from perdure.gateway.journal.batches.claims import Claim, Claims
from perdure.gateway.journal.batches.found import (
    TRIES,
    Adopt,
    Finder,
    Found,
    Record,
    disappeared,
)
from perdure.gateway.journal.batches.garbage import Garbage
from perdure.gateway.journal.batches.others import OtherWriters
from perdure.gateway.journal.batches.own import PATIENCE_S, OwnBatches
from perdure.gateway.journal.batches.owned import Batch, Owned, OwnedSessions, Waiting
from perdure.gateway.journal.batches.takeover import Takeover
from perdure.gateway.journal.encoding import JournalDamaged, frame
from perdure.gateway.journal.parts import Parts
from perdure.storage.base import Store

BATCH_BYTES = 8 << 20
"""Bytes of records after which a batch is full; the rest goes into the next one."""


class StoreJournal:
    """`adopt`: see `Finder`."""

    def __init__(
        self, store: Store, adopt: Adopt | None = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        writer, parts = uuid.uuid4().hex, Parts(store)
        self._claims = Claims(store)
        others = OtherWriters(store)
        self._garbage = Garbage(store, writer, self._claims, others)
        self._owned = OwnedSessions(self._garbage)
        self._own = OwnBatches(store, writer, self._owned.learn, patience_s)
        self._finder = Finder(self._claims, others, parts, adopt)
        self._takeover = Takeover(
            writer,
            self._finder,
            claims=self._claims,
            others=others,
            parts=parts,
            owned=self._owned,
            garbage=self._garbage,
        )
        self._queue: list[Append] = []
        self._writing: asyncio.Task[None] | None = None
        self._taking: dict[str, list[Append]] = {}
        """Appends to sessions that this process is taking over."""
        self._takeovers: set[asyncio.Task[None]] = set()

    async def read(self, session_id: str, after: int = 0) -> list[Record]:
        """The records from number `after` on. Raises: JournalDamaged, StoreUnavailable."""
        found: Found | None = None
        for _ in range(TRIES):
            owned = await self._still_owned(session_id)
            try:
                if owned is not None:
                    claim = Claim(owned.epoch, self._own.writer, 0, owned.base, None)
                    found = Found(claim, owned.pieces)
                else:
                    found = await self._finder.look(session_id)
                return await self._finder.read(session_id, found, after)
            except NotFound:  # it was packed, taken over or deleted meanwhile
                continue
            except JournalDamaged as error:
                intact = await self._finder.intact(session_id, found) if found else ()
                raise JournalDamaged(str(error), intact) from error
        intact = await self._finder.intact(session_id, found) if found else ()
        raise disappeared(session_id, intact)

    async def append(self, session_id: str, record: Record, *, position: int) -> None:
        """Returns when the store has it.

        Raises: Overtaken, JournalDamaged, ConfigurationError; GatewayUnavailable if the store did not
        answer. It may have the record all the same: then the next append at `position` raises Overtaken.
        """
        item = to_append(session_id, position, record)
        self._queue.append(item)
        self._wake()
        await item.done

    async def pack(self, session_id: str, records: Sequence[Record]) -> None:
        """One object holds all records of a closed session. Raises: StoreUnavailable."""
        owned = await self._still_owned(session_id)
        if owned is None or owned.records != len(records):
            return  # the process that owns it packs it
        frames = [*map(frame, records)]
        if await self._claims.put(session_id, owned.epoch + 1, "", 0, frames):
            self._owned.drop(session_id)
            if owned.epoch == 1:  # no other process ever served it
                await self._claims.delete(session_id, owned.epoch)
            else:
                await self._takeover.retire(session_id, owned.epoch)

    async def forget(self, session_id: str) -> None:
        """Delete a closed session's records. Raises: StoreUnavailable."""
        await self._claims.delete_session(session_id)
        self._owned.drop(session_id)

    async def aclose(self) -> None:
        """Write what is queued. A process whose sessions have all ended leaves no batch."""
        while self._writing is not None or self._takeovers:
            writing = [self._writing] if self._writing is not None else []
            await asyncio.gather(*self._takeovers, *writing, return_exceptions=True)
        await self._takeover.aclose()
        await self._garbage.aclose(is_needed=self._owned.any)

    async def _still_owned(self, session_id: str) -> Owned | None:
        """The session if this process owns it and no other has claimed it: one request tells."""
        owned = self._owned.serving(session_id)
        if owned is None:
            return None
        if self._own.unsure:
            await self._own.settle()
        if await self._claims.exists(session_id, owned.epoch + 1):
            self._owned.lost(session_id, owned)
            return None
        return owned

    # --- writing -------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._queue:
                waiting = self._next_batch()
                for session_id in [name for name in waiting if not self._serves(name)]:
                    self._take(session_id, waiting.pop(session_id))
                if waiting:
                    await self._commit(waiting)
        finally:
            self._writing = None

    def _next_batch(self) -> Waiting:
        waiting: Waiting = {}
        size = taken = 0
        for item in self._queue:
            waiting.setdefault(item.session_id, []).append(item)
            size, taken = size + len(item.data), taken + 1
            if size >= BATCH_BYTES:
                break
        del self._queue[:taken]
        return waiting

    def _serves(self, session_id: str) -> bool:
        return self._owned.serving(session_id) is not None and session_id not in self._taking

    async def _commit(self, waiting: Waiting) -> None:
        """Write one batch, and answer its appends."""
        batch: Batch | None = None

        def make(number: int) -> bytes | None:
            nonlocal batch
            batch = self._owned.batch(number, waiting)
            return None if batch is None else batch.data

        try:
            number = await self._own.write(make)
        except Exception as error:
            resolve([item for items in waiting.values() for item in items], _told(error))
            return
        if number is not None and batch is not None:
            self._owned.written(number, batch.epochs, batch.pieces)
        for items in waiting.values():
            resolve(items, None)

    def _take(self, session_id: str, items: list[Append]) -> None:
        """Take a session over, beside the batches of the other sessions."""
        waiting = self._taking.get(session_id)
        if waiting is not None:
            waiting.extend(items)
            return
        self._taking[session_id] = []
        task = asyncio.create_task(self._taken(session_id, items))
        self._takeovers.add(task)
        task.add_done_callback(self._takeovers.discard)

    async def _taken(self, session_id: str, items: list[Append]) -> None:
        try:
            await self._takeover.claim(session_id, items)
        except Exception as error:
            resolve(items, _told(error))
        finally:
            self._queue += self._taking.pop(session_id)
            if self._queue:
                self._wake()


def _told(error: Exception) -> Exception:
    if isinstance(error, StoreUnavailable):
        told = GatewayUnavailable(f"the journal cannot be written: {error}")
        told.__cause__ = error
        return told
    if isinstance(error, (ConfigurationError, JournalDamaged, Overtaken)):
        return error
    return GatewayUnavailable(f"the journal cannot be written: {error!r}")
