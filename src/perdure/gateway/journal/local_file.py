"""One session's journal file, with the lock that all processes of a host respect.

Readers share the lock. An appender holds it alone until its bytes are on disk, so what is read is
durable. The kernel releases a lock when its process ends, also after kill -9.
"""

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from perdure.gateway.journal.encoding import DecodedRecords, JournalDamaged, split


class Known(NamedTuple):
    """How far a process has read a session: the number of records, and where the last one ends."""

    records: int = 0
    end: int = 0


NOTHING = Known()


class Busy(Exception):
    """Another process writes this session right now."""


class SessionFile:
    """An open, locked file; closing it unlocks."""

    def __init__(self, path: str, *, write: bool) -> None:
        """Raises: Busy; FileNotFoundError when reading what is not there; OSError."""
        self.path = path
        flags = os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)
        try:
            self._handle = os.open(path, flags, 0o600)
        except FileNotFoundError:
            if not write:
                raise
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, flags, 0o600)
        try:
            fcntl.flock(self._handle, (fcntl.LOCK_EX if write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise Busy from None

    def after(self, known: Known) -> DecodedRecords:
        """The records behind `known`; `DecodedRecords.end` counts from the start of the file.

        Raises: JournalDamaged.
        """
        size = os.fstat(self._handle).st_size
        if size < known.end:
            raise JournalDamaged(f"{self.path} had {known.end} bytes and has {size}: it was cut")
        if size == known.end:
            return DecodedRecords([], known.end)
        records, length = split(self._bytes(known.end, size), self.path)
        return DecodedRecords(records, known.end + length)

    def append(self, data: bytes, at: int) -> None:
        """Write `data` at byte `at`, over a torn tail if there is one; `sync` makes it durable.

        Raises: OSError, and then the file ends at `at`.
        """
        try:
            if os.fstat(self._handle).st_size > at:
                os.ftruncate(self._handle, at)
            written = 0
            while written < len(data):
                written += os.pwrite(self._handle, data[written:], at + written)
            if at == 0:  # the first records: from now on the file must be found after a power cut
                _sync_folders(Path(self.path).parent)
        except OSError:
            os.ftruncate(self._handle, at)
            raise

    def sync(self, at: int) -> None:
        """Make what was appended at `at` survive a power cut. Raises: OSError, and it is removed."""
        try:
            os.fdatasync(self._handle)
        except OSError:
            os.ftruncate(self._handle, at)
            raise

    def close(self) -> None:
        os.close(self._handle)

    def _bytes(self, start: int, end: int) -> bytes:
        parts, position = [], start
        while position < end:
            part = os.pread(self._handle, end - position, position)
            if not part:
                break
            parts.append(part)
            position += len(part)
        return b"".join(parts)


def _sync_folders(folder: Path) -> None:
    """The names of a new file and of its folder must be as durable as its bytes."""
    for path in (folder, folder.parent):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
