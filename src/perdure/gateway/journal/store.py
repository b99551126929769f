"""The journal in the store: an answer waits until the store has its record.

Turns of all sessions that wait at the same time share one object of this process's chain
(`chains.own`). A session belongs to one process at a time (`chains.claims`); any other process
takes it over when it gets one of its calls (`chains.others`). Nothing is kept on this host's disk.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

from perdure.errors import (
    ConfigurationError,
    GatewayUnavailable,
    NotFound,
    PerdureError,
    StoreUnavailable,
)
from perdure.gateway.journal.appends import Append, accept, overtaken, resolve, to_append
from perdure.gateway.journal.base import Overtaken
from perdure.gateway.journal.chains.claims import UNCLAIMED, Claim, Claims
from perdure.gateway.journal.chains.entry import BATCH, Entry, Part, Piece, Standing, encode_batch
from perdure.gateway.journal.chains.garbage import Garbage
from perdure.gateway.journal.chains.others import OtherChains
from perdure.gateway.journal.chains.own import PATIENCE_S, OwnChain
from perdure.gateway.journal.encoding import JournalDamaged, frame
from perdure.gateway.journal.parts import MOVED, Moved, Parts
from perdure.storage.base import Store

BATCH_BYTES = 8 << 20
"""Bytes of records after which a batch is full; the rest goes into the next one."""
TRIES = 5

Record = dict[str, Any]

log = structlog.get_logger()


@dataclass
class _Owned:
    """A session whose records go to this process's chain."""

    epoch: int
    base: int
    """Records in its claim; the later ones lie in `pieces`."""
    pieces: list[Piece] = field(default_factory=list)
    released: bool = False
    """Another process takes it over: nothing is added, but a reader still finds the pieces."""

    @property
    def records(self) -> int:
        return self.pieces[-1].end if self.pieces else self.base

    def standing(self) -> Standing:
        return Standing(self.epoch, self.pieces[-1].number if self.pieces else 0, self.released)


class _Batch(NamedTuple):
    """What a batch of this process holds, by session."""

    epochs: Mapping[str, int]
    pieces: Mapping[str, Piece]


class _Found(NamedTuple):
    """A session of any process. Epoch 0: there is no claim yet."""

    claim: Claim
    pieces: Sequence[Piece]

    @property
    def records(self) -> int:
        return self.pieces[-1].end if self.pieces else self.claim.size


class StoreJournal:
    """`adopt` is awaited on the first read of a session without a claim: it uploads what only this
    host's disk has."""

    def __init__(
        self,
        store: Store,
        adopt: Callable[[str], Awaitable[bool]] | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._adopt = adopt
        self._parts = Parts(store)
        self._claims = Claims(store)
        self._others = OtherChains(store)
        self._chain = OwnChain(store, uuid.uuid4().hex, self._learn, patience_s)
        self._garbage = Garbage(store, self._chain.name, self._claims, self._others, self._moved)
        self._owned: dict[str, _Owned] = {}
        self._queue: list[Append] = []
        self._writing: asyncio.Task[None] | None = None
        self._taking: dict[str, list[Append]] = {}
        """Appends to sessions that this process is about to take."""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- reading -------------------------------------------------------------------------------

    async def read(self, session_id: str, after: int = 0) -> list[Record]:
        """The records from number `after` on. Raises: JournalDamaged, StoreUnavailable."""
        for _ in range(TRIES):
            owned = await self._still_owned(session_id)
            try:
                if owned is not None:
                    claim = Claim(owned.epoch, self._chain.name, 0, owned.base, None)
                    found = _Found(claim, owned.pieces)
                else:
                    found = await self._find(session_id)
                return await self._read(session_id, found, after)
            except NotFound:  # it was packed, taken over or deleted meanwhile
                continue
        raise JournalDamaged(f"records of session {session_id!r} disappear")

    async def _still_owned(self, session_id: str) -> _Owned | None:
        """The session if this process owns it and no other has taken it over."""
        owned = self._owned.get(session_id)
        if owned is None or owned.released:
            return None
        if self._chain.unsure:
            await self._chain.settle()
        if await self._claims.exists(session_id, owned.epoch + 1):
            self._lose(session_id, owned)
            return None
        return owned

    async def _find(self, session_id: str) -> _Found:
        """The newest claim, and where its later records lie. Raises: NotFound (look again)."""
        claim = await self._claims.newest(session_id)
        if claim is None or not claim.epoch:
            return _Found(await self._unclaimed(session_id, has_parts=claim is not None), [])
        if not claim.chain:
            return _Found(claim, [])
        pieces = await self._others.pieces(claim.chain, session_id, claim.epoch, claim.newest)
        if pieces and pieces[0].first != claim.size:
            raise JournalDamaged(f"record {claim.size} of session {session_id!r} is missing")
        if not pieces and await self._claims.exists(session_id, claim.epoch + 1):
            raise NotFound(f"session {session_id!r} has a newer claim")
        return _Found(claim, pieces)

    async def _read(self, session_id: str, found: _Found, after: int) -> list[Record]:
        """Raises: NotFound (look again)."""
        claim = found.claim
        wanted = [piece for piece in found.pieces if piece.end > after]
        later = await self._others.read(claim.chain, wanted) if wanted else []
        if after >= claim.size:
            return later[after - wanted[0].first :] if wanted else []
        before = claim.records
        if before is None:
            before = (await self._claims.get(session_id, claim.epoch)).records or []
        return before[after:] + later

    async def _unclaimed(self, session_id: str, *, has_parts: bool) -> Claim:
        """What an earlier version, or `local` durability, left of a session."""
        uploaded = self._adopt is not None and await self._adopt(session_id)
        if not (has_parts or uploaded):
            return UNCLAIMED
        try:
            records = await self._parts.read(session_id)
        except Moved as error:  # another process claimed it at this moment
            raise NotFound(str(error)) from None
        return Claim(0, "", 0, len(records), records)

    # --- appending -----------------------------------------------------------------------------

    async def append(self, session_id: str, record: Record, *, position: int) -> None:
        """Returns when the store has it.

        Raises: Overtaken, GatewayUnavailable (the store did not answer; if it has the record all the
        same, the next append at `position` raises Overtaken), JournalDamaged, ConfigurationError.
        """
        item = to_append(session_id, position, record)
        self._queue.append(item)
        self._wake()
        await item.done

    async def aclose(self) -> None:
        """Write what is queued."""
        while self._writing is not None or self._tasks:
            waiting = [*self._tasks, *([self._writing] if self._writing is not None else [])]
            await asyncio.gather(*waiting, return_exceptions=True)
        await self._garbage.aclose()

    def _wake(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._queue:
                sessions = self._next_batch()
                for session_id in [name for name in sessions if not self._serves(name)]:
                    self._take(session_id, sessions.pop(session_id))
                if sessions:
                    await self._commit(sessions)
        finally:
            self._writing = None

    def _next_batch(self) -> dict[str, list[Append]]:
        sessions: dict[str, list[Append]] = {}
        size = taken = 0
        for item in self._queue:
            sessions.setdefault(item.session_id, []).append(item)
            size, taken = size + len(item.data), taken + 1
            if size >= BATCH_BYTES:
                break
        del self._queue[:taken]
        return sessions

    def _serves(self, session_id: str) -> bool:
        owned = self._owned.get(session_id)
        return owned is not None and not owned.released and session_id not in self._taking

    async def _commit(self, sessions: dict[str, list[Append]]) -> None:
        """Write one batch, and answer its appends."""
        batch: _Batch | None = None

        def make(number: int) -> bytes | None:
            nonlocal batch
            parts = [*filter(None, (self._part(sessions, name) for name in [*sessions]))]
            if not parts:
                return None
            standings = {name: owned.standing() for name, owned in self._owned.items()}
            encoded = encode_batch(number, parts, standings)
            batch = _Batch({part.session_id: part.epoch for part in parts}, encoded.pieces)
            return encoded.data

        try:
            number = await self._chain.write(make)
        except Exception as error:
            resolve([item for items in sessions.values() for item in items], _told(error))
            return
        if number is not None and batch is not None:
            self._add(number, batch)
        for items in sessions.values():
            resolve(items, None)

    def _part(self, sessions: dict[str, list[Append]], session_id: str) -> Part | None:
        """What the batch takes from a session now. Appends that are too late are answered."""
        items, owned = sessions.pop(session_id), self._owned.get(session_id)
        if owned is None or owned.released:
            resolve(items, overtaken(session_id, items[0].position))
            return None
        accepted = accept(items, owned.records)
        if not accepted:
            return None
        sessions[session_id] = accepted
        frames = [item.data for item in accepted]
        return Part(session_id, owned.epoch, owned.records, frames, [*owned.pieces])

    def _add(self, number: int, batch: _Batch) -> None:
        """Note a batch of this process that is in the store."""
        added = []
        for session_id, piece in batch.pieces.items():
            owned = self._owned.get(session_id)
            # Another process may have claimed the session, with this piece, while it was written.
            if owned is not None and owned.epoch == batch.epochs[session_id]:
                owned.pieces.append(piece)
                added.append(session_id)
        self._garbage.written(number, added)

    def _learn(self, number: int, entry: Entry) -> None:
        """An entry of this chain that this process had not expected."""
        if entry.kind == BATCH:  # this process wrote it, and the answer was lost
            newest = {name: pieces[-1] for name, pieces in entry.pieces.items()}
            epochs = {name: entry.standings[name].epoch for name in newest}
            return self._add(number, _Batch(epochs, newest))
        self._garbage.foreign(number)
        for session_id, epoch in entry.released.items():
            owned = self._owned.get(session_id)
            if owned is not None and owned.epoch == epoch:
                owned.released = True
                self._garbage.released(session_id, epoch)

    # --- taking over ---------------------------------------------------------------------------

    def _take(self, session_id: str, items: list[Append]) -> None:
        waiting = self._taking.get(session_id)
        if waiting is not None:
            waiting.extend(items)
            return
        self._taking[session_id] = []
        self._start(self._taken(session_id, items))

    async def _taken(self, session_id: str, items: list[Append]) -> None:
        try:
            await self._claim(session_id, items)
        except Exception as error:
            resolve(items, _told(error))
        finally:
            self._queue += self._taking.pop(session_id)
            if self._queue:
                self._wake()

    async def _claim(self, session_id: str, items: list[Append]) -> None:
        """Make the session this process's own, with `items` as its next records."""
        found = await self._found(session_id)
        items[:] = accept(items, found.records)
        if not items:
            return
        found = await self._fenced(session_id, found)
        items[:] = accept(items, found.records)
        if not items:
            return
        epoch = found.claim.epoch + 1
        records = await self._read(session_id, found, 0)
        frames = [*map(frame, records), *(item.data for item in items)]
        newest = self._garbage.newest
        if not await self._claims.put(session_id, epoch, self._chain.name, newest, frames):
            return resolve(items, overtaken(session_id, len(records)))
        self._garbage.left(session_id)
        self._owned[session_id] = _Owned(epoch, len(frames))
        resolve(items, None)
        if epoch > 1:
            self._start(self._retired(session_id, epoch - 1))
        if found.claim.chain not in ("", self._chain.name):
            self._garbage.taken_from(found.claim.chain)

    async def _found(self, session_id: str) -> _Found:
        for _ in range(TRIES):
            try:
                return await self._find(session_id)
            except NotFound:
                continue
        raise JournalDamaged(f"records of session {session_id!r} disappear")

    async def _fenced(self, session_id: str, found: _Found) -> _Found:
        """The session as it is after its owner can add nothing more. Raises: Overtaken."""
        claim = found.claim
        if not claim.epoch:
            return await self._closed_parts(session_id, found) if claim.size else found
        if claim.chain in ("", self._chain.name):
            return found
        await self._others.release(claim.chain, session_id, claim.epoch, claim.newest)
        again = await self._found(session_id)
        if again.claim.epoch != claim.epoch:
            raise overtaken(session_id, found.records)
        log.info("session taken over", session_id=session_id, epoch=claim.epoch + 1)
        return again

    async def _closed_parts(self, session_id: str, found: _Found) -> _Found:
        """A gateway with `local` durability cannot add a part behind the last one. Raises: Overtaken."""
        moved, records = {"kind": MOVED}, found.claim.records or []
        if records[-1] == moved:
            return found
        if not await self._parts.put_records(session_id, found.records, [moved]):
            raise overtaken(session_id, found.records)
        records = [*records, moved]
        return _Found(found.claim._replace(size=len(records), records=records), [])

    # --- closed sessions -----------------------------------------------------------------------

    async def pack(self, session_id: str, records: Sequence[Record]) -> None:
        """One object holds all records of a closed session. Raises: StoreUnavailable."""
        owned = await self._still_owned(session_id)
        if owned is None or owned.records != len(records):
            return  # the process that owns it packs it
        frames = [*map(frame, records)]
        if await self._claims.put(session_id, owned.epoch + 1, "", 0, frames):
            self._forgets(session_id)
            if owned.epoch == 1:  # no other process ever served it
                await self._claims.delete(session_id, owned.epoch)
            else:
                await self._retired(session_id, owned.epoch)

    async def forget(self, session_id: str) -> None:
        """Delete a closed session's records. Raises: StoreUnavailable."""
        await self._claims.delete_session(session_id)
        self._forgets(session_id)

    def _forgets(self, session_id: str) -> None:
        self._owned.pop(session_id, None)
        self._garbage.left(session_id)

    def _moved(self, session_id: str, epoch: int) -> None:
        """A released session has been claimed by another process."""
        owned = self._owned.get(session_id)
        if owned is not None and owned.released and owned.epoch == epoch:
            self._forgets(session_id)

    def _lose(self, session_id: str, owned: _Owned) -> None:
        """Another process has claimed it, with its records: this chain's copies are not needed."""
        if self._owned.get(session_id) is owned:
            self._forgets(session_id)

    async def _retired(self, session_id: str, epoch: int) -> None:
        try:
            await self._claims.retire(session_id, epoch)
        except PerdureError as error:  # it goes with the session
            log.warning("cannot retire a claim", session_id=session_id, error=str(error))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _told(error: Exception) -> Exception:
    if isinstance(error, StoreUnavailable):
        told = GatewayUnavailable(f"the journal cannot be written: {error}")
        told.__cause__ = error
        return told
    if isinstance(error, (ConfigurationError, JournalDamaged, Overtaken)):
        return error
    return GatewayUnavailable(f"the journal cannot be written: {error!r}")
