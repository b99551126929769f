"""Replays an earlier attempt: its recorded completions answer the new attempt's matching requests.

Owns which recorded turn answers which request, and when the replay of a chain ends. A recorded turn is
used once, because the ids of its tool calls must stay unique.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from perdure.gateway.journal.turn_record import TurnRecord, prompt_of


class RecordedTurn(NamedTuple):
    """A turn of the earlier attempt. `prompt`: shape [P]. `parent`: index of its parent turn in this
    session."""

    record: TurnRecord
    prompt: "array[int]"
    parent: int | None
    origin: str


class Recording:
    """The turns of an earlier attempt that have not been used yet."""

    def __init__(self, session_id: str, records: Sequence[TurnRecord]) -> None:
        self._session_id = session_id
        self._records = records
        self._waiting: dict[str, list[TurnRecord]] = {}
        self._ours: dict[int, int] = {}
        """Maps the index of a recorded turn to its index in this session."""
        self._theirs: dict[str, str] = {}
        """Maps a chain of this session to its chain in the recording. Harnesses give sub-agents new names
        in each run."""
        self._over: set[str] = set()
        self._by_origin = {self._origin(record): record for record in records}
        for record in records:
            self._waiting.setdefault(record.chain, []).append(record)

    def take(self, chain: str, across_sha256: str) -> RecordedTurn | None:
        """The recorded turn that answers a request; None if none does or the chain's replay has ended."""
        if chain in self._over:
            return None
        theirs = self._theirs.get(chain) or self._counterpart(chain, across_sha256)
        waiting = self._waiting.get(theirs, [])
        found = next((r for r in waiting if r.across_sha256 == across_sha256), None)
        if found is None:
            return None
        waiting.remove(found)  # at once, so that no other call of the session takes it too
        self._theirs[chain] = theirs
        return RecordedTurn(
            found, prompt_of(self._records, found), self._parent(found), self._origin(found)
        )

    def give_back(self, recorded: RecordedTurn) -> None:
        """Make a turn available again after its commit failed; the agent will repeat the request."""
        self._waiting[recorded.record.chain].insert(0, recorded.record)

    def committed(self, record: TurnRecord) -> None:
        """Note a turn of this session that any process committed. A chain's replay ends with its first
        turn that had to be sampled; side and stray requests do not count."""
        theirs = self._by_origin.get(record.replayed_from)
        if theirs is None:
            if record.purpose.is_of_trajectory:
                self._over.add(record.chain)
            return
        self._ours[theirs.index] = record.index
        self._theirs[record.chain] = theirs.chain
        if theirs in self._waiting[theirs.chain]:
            self._waiting[theirs.chain].remove(theirs)

    def _counterpart(self, chain: str, across_sha256: str) -> str:
        """The recorded chain that a new chain repeats: the one with its name, otherwise the one with the
        same first request."""
        if chain in self._waiting:
            return chain
        taken = set(self._theirs.values())
        for theirs, waiting in self._waiting.items():
            if theirs not in taken and waiting and waiting[0].across_sha256 == across_sha256:
                return theirs
        return chain

    def _origin(self, record: TurnRecord) -> str:
        return record.replayed_from or f"{self._session_id}/{record.index}"

    def _parent(self, record: TurnRecord) -> int | None:
        return None if record.parent is None else self._ours.get(record.parent)
