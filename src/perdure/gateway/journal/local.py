"""The journal on this host's disk: one append-only file per session, shared by its gateways.

Owns group commit (one thread syncs for all sessions) and fencing between processes: a record gets
the number its writer named, or the writer gets `Overtaken`. Files are in `local_file`, bytes in
`encoding`, other hosts in `mirror` and `store`.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import GatewayUnavailable
from perdure.gateway.journal.appends import Append, accept, resolve, to_append
from perdure.gateway.journal.encoding import DecodedRecords, JournalDamaged, frame
from perdure.gateway.journal.local_file import NOTHING, Busy, Known, SessionFile

FILE_NAME = "journal.log"
BATCH = 256
"""The most records that are committed together, with one sync per file."""
BUSY_PAUSE_S = 0.005
BUSY_LIMIT_S = 10.0
"""Seconds. A process that locks a file for longer hangs: the call fails, and its client repeats it."""
KEPT = 8192
"""For so many sessions the end of the file is remembered; other files are read from the start."""


class _Written(NamedTuple):
    """Appends of one session, written but not synced."""

    file: SessionFile
    before: Known
    after: Known
    items: list[Append]


class LocalJournal:
    """All sessions' files under one folder; any number of processes of one host share it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = str(folder)
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._known_lock = threading.Lock()
        self._queue: queue.SimpleQueue[Append | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    async def read(self, session_id: str, after: int = 0) -> list[dict[str, Any]]:
        """The durable records from number `after` on.

        Raises: JournalDamaged; GatewayUnavailable when another process holds the file and hangs.
        """
        known = self._look_up(session_id)
        start = known if known.records <= after else NOTHING
        found = await self.tail(session_id, start)
        return found.records[after - start.records :]

    async def tail(self, session_id: str, known: Known) -> DecodedRecords:
        """The records behind `known`; costs what is new. Raises: as `read`."""
        with contextlib.suppress(OSError):
            size = os.stat(self._path(session_id)).st_size
            if size == known.end:  # nothing new, without a thread
                return DecodedRecords([], known.end)
        deadline = time.monotonic() + BUSY_LIMIT_S
        while True:
            try:
                return await asyncio.to_thread(self._read, session_id, known)
            except Busy:
                if time.monotonic() > deadline:
                    raise _hangs(session_id) from None
                await asyncio.sleep(BUSY_PAUSE_S)

    async def find(self, session_id: str, records: int, known: Known = NOTHING) -> Known:
        """Where the first `records` records end, looking from `known` on."""
        found = await self.tail(session_id, known)
        frames = map(frame, found.records[: records - known.records])
        return Known(records, known.end + sum(map(len, frames)))

    async def append(self, session_id: str, record: dict[str, Any], *, position: int) -> None:
        """Returns when the record survives a power cut.

        Raises: Overtaken, GatewayUnavailable, JournalDamaged; then nothing of it is in the file.
        """
        item = to_append(session_id, position, record)
        self._queue.put(item)
        await item.done

    async def pack(self, session_id: str, records: Sequence[dict[str, Any]]) -> None:
        """A session is one file already."""

    async def forget(self, session_id: str) -> None:
        await asyncio.to_thread(self._forget, session_id)

    async def aclose(self) -> None:
        """Write what is queued."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _forget(self, session_id: str) -> None:
        path = Path(self._path(session_id))
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has partials of a call that ends right now
            path.parent.rmdir()
        with self._known_lock:
            self._known.pop(session_id, None)

    def _path(self, session_id: str) -> str:
        """As text: a `Path` would cost a turn more than the system calls on it."""
        return f"{self._folder}/{session_id}/{FILE_NAME}"

    def _read(self, session_id: str, start: Known) -> DecodedRecords:
        try:
            file = SessionFile(self._path(session_id), write=False)
        except FileNotFoundError:
            return DecodedRecords([], 0)
        try:
            found = file.after(start)
        finally:
            file.close()
        self._learn(session_id, Known(start.records + len(found.records), found.end))
        return found

    def _look_up(self, session_id: str) -> Known:
        with self._known_lock:
            return self._known.get(session_id, NOTHING)

    def _learn(self, session_id: str, known: Known) -> None:
        with self._known_lock:
            if known.records >= self._known.get(session_id, NOTHING).records:
                self._known[session_id] = known
                self._known.move_to_end(session_id)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)

    # --- the committing thread -----------------------------------------------------------------

    def _run(self) -> None:
        busy: list[Append] = []
        stop = False
        while not stop or busy:
            batch, stopped = self._drain(wait=None if not busy and not stop else BUSY_PAUSE_S)
            stop = stop or stopped
            busy = self._commit(busy + batch)

    def _drain(self, wait: float | None) -> tuple[list[Append], bool]:
        """What is queued; waits `wait` seconds for the first item (None: without limit)."""
        batch: list[Append] = []
        while len(batch) < BATCH:
            try:
                item = self._queue.get(block=not batch, timeout=wait)
            except queue.Empty:
                break
            if item is None:
                return batch, True
            batch.append(item)
        return batch, False

    def _commit(self, batch: list[Append]) -> list[Append]:
        """Write all, sync each file once, wake the waiting turns; return the appends to busy files."""
        sessions: dict[str, list[Append]] = {}
        for item in batch:
            sessions.setdefault(item.session_id, []).append(item)
        busy: list[Append] = []
        written: list[_Written] = []
        for session_id, items in sessions.items():
            try:
                written += self._write(session_id, items)
            except Busy:
                busy += _in_time(items)
            except (OSError, JournalDamaged) as error:
                resolve(items, _told(error))
        for one in written:
            self._sync(one)
        return busy

    def _write(self, session_id: str, items: list[Append]) -> list[_Written]:
        """Write the appends of one session that name the right number; answer the others."""
        file = SessionFile(self._path(session_id), write=True)
        try:
            known = self._look_up(session_id)
            found = file.after(known)
            before = Known(known.records + len(found.records), found.end)
            self._learn(session_id, before)
            accepted = accept(items, before.records)
            if not accepted:
                file.close()
                return []
            data = b"".join(item.data for item in accepted)
            file.append(data, before.end)
        except (OSError, JournalDamaged):
            file.close()
            raise
        after = Known(before.records + len(accepted), before.end + len(data))
        return [_Written(file, before, after, accepted)]

    def _sync(self, written: _Written) -> None:
        try:
            written.file.sync(written.before.end)
        except OSError as error:
            resolve(written.items, _told(error))
        else:
            self._learn(written.items[0].session_id, written.after)
            resolve(written.items, None)
        finally:
            written.file.close()


def _in_time(items: list[Append]) -> list[Append]:
    oldest = time.monotonic() - BUSY_LIMIT_S
    for item in items:
        if item.since < oldest:
            resolve([item], _hangs(item.session_id))
    return [item for item in items if item.since >= oldest]


def _hangs(session_id: str) -> GatewayUnavailable:
    return GatewayUnavailable(
        f"another gateway process has been writing session {session_id!r} for {BUSY_LIMIT_S:g} s"
    )


def _told(error: OSError | JournalDamaged) -> Exception:
    if isinstance(error, OSError):
        return GatewayUnavailable(f"the journal cannot be written: {error.strerror}")
    return error
