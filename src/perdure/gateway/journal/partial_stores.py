"""The two places for partials: this host's disk, beside the journal, or the store.

Neither is synced as a turn is: partials survive a killed process, but may not survive a power cut.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from perdure.errors import NotFound
from perdure.gateway.journal.encoding import frame
from perdure.gateway.journal.partials import Line, TryName
from perdure.storage import keys
from perdure.storage.base import Store

FILE_EVERY_S = 0.5
"""A write costs less than 1 % of what a turn of this length costs."""
OBJECT_EVERY_S = 10.0
"""Each write is one request that uploads the whole partial."""
FOLDER = "partial"


class LocalPartialStore:
    """`<folder>/<session>/partial/<call>.<suffix>`, appended to without a sync."""

    every_s = FILE_EVERY_S
    appends = True

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    async def read(self, session_id: str, call: str) -> list[bytes]:
        paths = self._paths(
            session_id, call
        )  # nearly always empty, so listing is cheaper than a thread
        return await asyncio.to_thread(lambda: [*_contents(paths)]) if paths else []

    async def write(self, parts: Mapping[TryName, Sequence[Line]]) -> None:
        await asyncio.to_thread(self._write, parts)

    async def clear(self, session_id: str, call: str | None = None) -> None:
        await asyncio.to_thread(self._clear, session_id, call)

    def _write(self, parts: Mapping[TryName, Sequence[Line]]) -> None:
        for name, lines in parts.items():
            folder = Path(self._folder, name.session_id, FOLDER)
            _append(folder / f"{name.call}.{name.suffix}", b"".join(map(frame, lines)))

    def _clear(self, session_id: str, call: str | None) -> None:
        for path in self._paths(session_id, call):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or never made
            Path(self._folder, session_id, FOLDER).rmdir()

    def _paths(self, session_id: str, call: str | None) -> list[Path]:
        folder = f"{self._folder}/{session_id}/{FOLDER}"
        try:
            found = os.listdir(folder)
        except FileNotFoundError:
            return []
        wanted = (name for name in found if call is None or name.startswith(f"{call}."))
        return [Path(folder, name) for name in wanted]


def _append(path: Path, data: bytes) -> None:
    while True:  # the end of another call may have removed the empty folder
        with contextlib.suppress(FileNotFoundError), path.open("ab", buffering=0) as file:
            file.write(data)
            return
        path.parent.mkdir(exist_ok=True)


def _contents(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path.read_bytes()


class RemotePartialStore:
    """`journal/<session>/partial-<call>`: rewritten whole; the newest writer wins."""

    every_s = OBJECT_EVERY_S
    appends = False

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, session_id: str, call: str) -> list[bytes]:
        try:
            return [(await self._store.get(_key(session_id, call))).data]
        except NotFound:
            return []

    async def write(self, parts: Mapping[TryName, Sequence[Line]]) -> None:
        await asyncio.gather(*(self._put(name, lines) for name, lines in parts.items()))

    async def _put(self, name: TryName, lines: Sequence[Line]) -> None:
        await self._store.put(_key(name.session_id, name.call), b"".join(map(frame, lines)))

    async def clear(self, session_id: str, call: str | None = None) -> None:
        if call is not None:
            return await self._store.delete(_key(session_id, call))
        async for key in self._store.list(_key(session_id, "")):
            await self._store.delete(key)


def _key(session_id: str, call: str) -> str:
    return f"{keys.journal(session_id)}{FOLDER}-{call}"
