"""The journal: one append-only file per session, durable before an answer leaves.

A record is a line `crc32 length json`. A torn last line (killed while writing, so never answered)
is cut when the file is read; damage anywhere else is an error, never a guess.
"""

import asyncio
import fcntl
import json
import os
import queue
import threading
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import Boundary, ConfigurationError, PerdureError

FILE_NAME = "journal.log"
BATCH = 256
"""Records committed together at most; one batch pays for its disk syncs once."""


class JournalDamaged(PerdureError):
    """A record that was durable does not read back: the disk or somebody changed it."""

    boundary = Boundary.GATEWAY


class _Append(NamedTuple):
    path: Path
    data: bytes
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"


class Journal:
    """All sessions' files under one folder; a single thread commits for all of them."""

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigurationError when another gateway process holds the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = _lock(folder / ".lock")
        self._queue: queue.SimpleQueue[_Append | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is queued and let another process take the folder."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._lock)

    async def append(self, session_id: str, record: dict[str, Any]) -> None:
        """Returns when the record survives a power cut.

        Raises: OSError, and then nothing of the record is in the file.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Append(self._path(session_id), _frame(record), loop, done))
        await done

    def exists(self, session_id: str) -> bool:
        return self._path(session_id).is_file()

    def read(self, session_id: str) -> list[dict[str, Any]]:
        """Every record of the session, oldest first; a torn tail is cut off the file.

        Raises: JournalDamaged.
        """
        path = self._path(session_id)
        data = path.read_bytes()
        records: list[dict[str, Any]] = []
        position = 0
        while position < len(data):
            end = data.find(b"\n", position)
            record = _parse(data[position:end]) if end != -1 else None
            if record is None:
                break
            records.append(record)
            position = end + 1
        if position < len(data):
            _cut(path, data, position)
        return records

    def _path(self, session_id: str) -> Path:
        return self._folder / session_id / FILE_NAME

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, stop = self._drain(first)
            _commit(batch)
            if stop:
                return

    def _drain(self, first: _Append) -> tuple[list[_Append], bool]:
        batch = [first]
        while len(batch) < BATCH:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following is None:
                return batch, True
            batch.append(following)
        return batch, False


def _lock(path: Path) -> int:
    """The kernel drops the lock when the process dies, however it dies."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigurationError(
            f"another gateway is running on {path.parent}: stop it, or set another PERDURE_HOME"
        ) from None
    return handle


def _frame(record: dict[str, Any]) -> bytes:
    payload = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %d %s\n" % (zlib.crc32(payload), len(payload), payload)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of one line, or None when it is torn or damaged."""
    crc, _, rest = line.partition(b" ")
    length, _, payload = rest.partition(b" ")
    if length != b"%d" % len(payload) or crc != b"%08x" % zlib.crc32(payload):
        return None
    record: dict[str, Any] = json.loads(payload)
    return record


def _cut(path: Path, data: bytes, position: int) -> None:
    tail = data[position:]
    if any(_parse(line) is not None for line in tail.split(b"\n")[1:]):
        raise JournalDamaged(f"{path} is damaged at byte {position}, before its last record")
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(handle, position)
        os.fsync(handle)
    finally:
        os.close(handle)


def _commit(batch: list[_Append]) -> None:
    """Write all, then sync each file once, then wake the waiting turns."""
    files: dict[Path, list[_Append]] = {}
    for item in batch:
        files.setdefault(item.path, []).append(item)
    written: list[tuple[int, list[_Append]]] = []
    for path, items in files.items():
        try:
            written.append((_write(path, b"".join(item.data for item in items)), items))
        except OSError as error:
            _resolve(items, error)
    for handle, items in written:
        _resolve(items, _sync(handle))


def _write(path: Path, data: bytes) -> int:
    """Append all of `data` or none of it; returns the open file, still to be synced."""
    created = not path.exists()
    if created:
        path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    size = os.fstat(handle).st_size
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        if created:
            _sync_folders(path.parent)
    except OSError:
        os.ftruncate(handle, size)
        os.close(handle)
        raise
    return handle


def _sync_folders(folder: Path) -> None:
    """The names of a new file and of its folder must be as durable as its bytes."""
    for path in (folder, folder.parent):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sync(handle: int) -> OSError | None:
    try:
        os.fdatasync(handle)
    except OSError as error:
        return error
    finally:
        os.close(handle)
    return None


def _resolve(items: list[_Append], error: OSError | None) -> None:
    for item in items:
        try:
            item.loop.call_soon_threadsafe(_finish, item.done, error)
        except RuntimeError:  # the loop ended; nobody waits for the answer any more
            continue


def _finish(done: "asyncio.Future[None]", error: OSError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
