"""The journal: the gateway writes every turn to the store before it answers.

Record n of a session is the object `journal/<session>/<n>`, which is written only if it is absent. So
the store decides which of two gateway processes continues a session. Any process can read it.
"""

import asyncio
from typing import Any

from perdure.errors import Boundary, ConfigurationError, NotFound, PerdureError
from perdure.gateway.journal.record_encoding import JournalDamaged, frame, unframe
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.base import Store

READ_AT_ONCE = 16
Record = dict[str, Any]


class RecordNumberTaken(PerdureError):
    """Another gateway process wrote this record number first: read its records, then decide again."""

    boundary = Boundary.GATEWAY


class Journal:
    """The records of all sessions. Every method raises StoreUnavailable.

    Records are numbered 0, 1, ... in each session. A writer gives the number for its record.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, session_id: str, after: int = 0) -> list[Record]:
        """The records from number `after` on; [] if there are none. If nothing is new, this costs one
        request. Raises: JournalDamaged."""
        if after and not await self._store.exists(store_keys.journal_record(session_id, after)):
            return []
        end = await self._end(session_id, after)
        records: list[Record] = []
        for start in range(after, end, READ_AT_ONCE):
            numbers = range(start, min(start + READ_AT_ONCE, end))
            found = await asyncio.gather(*(self._record(session_id, n) for n in numbers))
            for number, record in zip(numbers, found, strict=True):
                if record is None:
                    name = store_keys.journal_record(session_id, number)
                    problem = f"{self._store.url}/{name} is missing or damaged"
                    raise JournalDamaged(problem, records)
                records.append(record)
        return records

    async def append(self, session_id: str, record: Record, *, position: int) -> None:
        """Write a record; it is durable on return.

        Raises: RecordNumberTaken if number `position` is taken. After StoreUnavailable the store may still have
        the record; then the next append at `position` raises RecordNumberTaken.
        """
        name = store_keys.journal_record(session_id, position)
        if not await self._store.put_if_absent(name, frame(record)):
            raise RecordNumberTaken(f"{name} was written by another gateway")

    async def forget(self, session_id: str) -> None:
        """Delete the records of a closed session. Repeating is harmless."""
        names = [name async for name in self._store.list(store_keys.journal(session_id))]
        # The first record goes first: a partly deleted journal then reads as damaged, not as shorter.
        await self._store.delete_many(names[:1])
        await self._store.delete_many(names[1:])

    async def _end(self, session_id: str, after: int) -> int:
        """One more than the highest number."""
        prefix, end = store_keys.journal(session_id), after
        before = store_keys.journal_record(session_id, after - 1) if after else ""
        async for name in self._store.list(prefix, after=before):
            if not store_keys.is_journal_record(name):
                raise ConfigurationError(
                    f"{self._store.url}/{name} is from an earlier version of Perdure: finish the run "
                    "with that version, or delete journal/ and journal-batches/ in the store",
                    boundary=Boundary.STORE,
                )
            end = int(name.removeprefix(prefix)) + 1
        return end

    async def _record(self, session_id: str, number: int) -> Record | None:
        """The record; None if it is missing or damaged."""
        try:
            data = (await self._store.get(store_keys.journal_record(session_id, number))).data
        except NotFound:
            return None
        return unframe(data)


def refuse_earlier(settings: Settings) -> None:
    """Raises: ConfigurationError if the home holds turns of open rollouts from an earlier version."""
    folder = settings.home.absolute() / "journal"
    if next(folder.glob("*/journal.log"), None) is not None:
        raise ConfigurationError(
            f"{folder} has turns from an earlier version of Perdure: finish their runs with that "
            "version, or delete the folder"
        )
