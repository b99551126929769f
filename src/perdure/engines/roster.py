"""The engines of a home, in one small object of the store that all its processes share.

Owns the document and its compare-and-swap; nobody keeps a truth of their own about an engine.
"""

import asyncio
import hashlib
import hmac
import random
from collections.abc import Callable
from typing import NamedTuple, Protocol

from perdure.engines.state import EngineRecord
from perdure.errors import NotFound, PreconditionFailed
from perdure.storage.base import Store, Stored
from perdure.types import Frozen


class Roster(Frozen):
    """All engines, and the generation that the next boot gets."""

    engines: tuple[EngineRecord, ...] = ()
    next_generation: int = 1

    def get(self, name: str) -> EngineRecord | None:
        return next((engine for engine in self.engines if engine.name == name), None)

    def having(self, record: EngineRecord) -> "Roster":
        """With this record in place of the engine's own, or added at the end."""
        engines = {engine.name: engine for engine in self.engines} | {record.name: record}
        following = max(self.next_generation, record.generation + 1)
        return Roster(engines=tuple(engines.values()), next_generation=following)

    def without(self, name: str) -> "Roster":
        kept = tuple(engine for engine in self.engines if engine.name != name)
        return self.model_copy(update={"engines": kept})


Change = Callable[[Roster], Roster]


class SharedRoster(Protocol):
    """A roster that other processes read and change too."""

    async def read(self) -> Roster:
        """Raises: StoreUnavailable."""
        ...

    async def change(self, change: Change) -> Roster:
        """Apply a pure function to the newest roster, again if somebody else was first.

        Raises: StoreUnavailable, and what `change` raises.
        """
        ...


def roster_key(secret: bytes) -> str:
    """Those who share a secret share sessions, and so their engines."""
    name = hmac.new(secret, b"engines", hashlib.sha256).hexdigest()[:16]
    return f"engines/{name}.json"


class _Found(NamedTuple):
    roster: Roster
    stored: Stored | None


class StoredRoster:
    """The roster as an object of the store."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    async def read(self) -> Roster:
        return (await self._find()).roster

    async def change(self, change: Change) -> Roster:
        while True:
            found = await self._find()
            wanted = change(found.roster)
            if wanted == found.roster or await self._write(wanted, found.stored):
                return wanted
            await asyncio.sleep(random.uniform(0.005, 0.05))  # somebody else was first

    async def _find(self) -> _Found:
        try:
            stored = await self._store.get(self._key)
        except NotFound:
            return _Found(Roster(), None)
        return _Found(Roster.model_validate_json(stored.data), stored)

    async def _write(self, roster: Roster, stored: Stored | None) -> bool:
        data = roster.model_dump_json(indent=1).encode()
        if stored is None:
            return await self._store.put_if_absent(self._key, data)
        try:
            await self._store.put(self._key, data, if_match=stored.etag)
        except PreconditionFailed:
            return False
        return True


class LoneRoster:
    """The roster of a single process that has no store: scripts and benchmarks."""

    def __init__(self) -> None:
        self._roster = Roster()

    async def read(self) -> Roster:
        return self._roster

    async def change(self, change: Change) -> Roster:
        self._roster = change(self._roster)
        return self._roster
