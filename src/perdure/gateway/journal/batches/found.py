"""Where the records of a session are, whichever process writes them, and how they are read."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from perdure.errors import NotFound
from perdure.gateway.journal.batches.claims import UNCLAIMED, Claim, Claims
from perdure.gateway.journal.batches.entry import Piece
from perdure.gateway.journal.batches.others import OtherWriters
from perdure.gateway.journal.encoding import JournalDamaged
from perdure.gateway.journal.parts import Moved, Parts

TRIES = 5

Adopt = Callable[[str], Awaitable[bool]]
Record = dict[str, Any]


class Found(NamedTuple):
    """A session of any process. Epoch 0: there is no claim yet."""

    claim: Claim
    pieces: Sequence[Piece]
    """Of the batches with its later records."""

    @property
    def records(self) -> int:
        return self.pieces[-1].end if self.pieces else self.claim.size


class Finder:
    """`adopt` is awaited on the first read of a session without a claim: it uploads what only this
    host's disk has. Every method raises StoreUnavailable and JournalDamaged."""

    def __init__(
        self, claims: Claims, others: OtherWriters, parts: Parts, adopt: Adopt | None
    ) -> None:
        self._claims = claims
        self._others = others
        self._parts = parts
        self._adopt = adopt

    async def find(self, session_id: str) -> Found:
        """The newest claim, and where its later records are."""
        for _ in range(TRIES):
            try:
                return await self.look(session_id)
            except NotFound:
                continue
        raise disappeared(session_id)

    async def look(self, session_id: str) -> Found:
        """One try of `find`. Raises: NotFound if the session moves meanwhile."""
        claim = await self._claims.newest(session_id)
        if claim is None or not claim.epoch:
            return Found(await self._unclaimed(session_id, has_parts=claim is not None), [])
        if not claim.writer:
            return Found(claim, [])
        try:
            pieces = await self._others.pieces(claim.writer, session_id, claim.epoch, claim.newest)
        except JournalDamaged:
            if (await self._claims.look(session_id)).epochs[-1:] == [claim.epoch]:
                raise
            raise NotFound(f"session {session_id!r} has another claim") from None
        if pieces and pieces[0].first != claim.size:
            raise JournalDamaged(f"record {claim.size} of session {session_id!r} is missing")
        if not pieces and await self._claims.exists(session_id, claim.epoch + 1):
            raise NotFound(f"session {session_id!r} has a newer claim")
        return Found(claim, pieces)

    async def read(self, session_id: str, found: Found, after: int) -> list[Record]:
        """The records from number `after` on. Raises: NotFound if the session moves meanwhile."""
        claim = found.claim
        wanted = [piece for piece in found.pieces if piece.end > after]
        later = await self._others.read(claim.writer, wanted) if wanted else []
        if after >= claim.size:
            return later[after - wanted[0].first :] if wanted else []
        before = claim.records
        if before is None:
            before = (await self._claims.get(session_id, claim.epoch)).records or []
        return before[after:] + later

    async def intact(self, session_id: str, found: Found) -> list[Record]:
        """The records before the first that does not read back."""
        records: list[Record] = []
        try:
            before = found.claim.records
            if before is None:
                before = (await self._claims.get(session_id, found.claim.epoch)).records
            records += before or []
            for piece in found.pieces:
                records += await self._others.read(found.claim.writer, [piece])
        except (JournalDamaged, NotFound):
            pass
        return records

    async def _unclaimed(self, session_id: str, *, has_parts: bool) -> Claim:
        """The records that a gateway with `local` durability left."""
        uploaded = self._adopt is not None and await self._adopt(session_id)
        if not (has_parts or uploaded):
            return UNCLAIMED
        try:
            records = await self._parts.read(session_id)
        except Moved as error:  # another process claimed it at this moment
            raise NotFound(str(error)) from None
        return Claim(0, "", 0, len(records), records)


def disappeared(session_id: str, intact: Sequence[Record] = ()) -> JournalDamaged:
    return JournalDamaged(f"records of session {session_id!r} disappear", intact)
