"""The seats of a home: how many rollouts may have an agent's sandbox there at once.

All worker processes of the home share the seats as files of one folder. A process reserves a seat
while it boots a sandbox, then takes it in the name of that sandbox. The worker that watches the
agent renews it. A seat that is not renewed becomes free, so a crash cannot leak one.
"""

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, time_ns
from uuid import uuid4

RESERVED = "reserved-"
"""Prefix of a seat whose sandbox is still booting. The booting process holds a lock on the file."""
DRAFT = "."
"""Prefix of a file that is not a seat yet."""
LOCK = ".lock"
LAPSES_S = 120.0
"""Seconds until a seat that is not renewed becomes free. It exceeds the pause between two tries."""


LAPSED_LOOK_S = 5.0
"""Seconds between two checks of the age of every seat while all are taken."""


TICK_NS = 100_000_000
"""Nanoseconds within which two changes of a folder may get the same mtime (a kernel tick)."""


class Reservation:
    """A seat for a sandbox that is booting. `release` or the death of this process frees it."""

    def __init__(self, path: Path, locked: int) -> None:
        self._path = path
        self._unlock = weakref.finalize(self, os.close, locked)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._unlock()


class Seats:
    """`most`: the number of seats."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._full: tuple[int, float] | None = None
        """The folder's mtime when all seats were found taken, and the time of that check."""

    def reserve(self) -> Reservation | None:
        """None if no seat is free, or if another process is reserving one right now."""
        if self._is_still_full():
            return None
        with self._alone() as alone:
            if not alone:
                return None
            changed = self.folder.stat().st_mtime_ns
            if self.taken() >= self.most:
                settled = time_ns() - changed > TICK_NS
                self._full = (changed, monotonic()) if settled else None
                return None
            draft = self.folder / f"{DRAFT}{uuid4().hex}"
            locked = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(locked, fcntl.LOCK_EX)
            path = self.folder / f"{RESERVED}{uuid4().hex}"
            return Reservation(draft.rename(path), locked)

    def take(self, sandbox: str) -> None:
        """Take a seat in the name of this sandbox, or renew it. Does nothing if the disk is
        full."""
        path = self.folder / sandbox
        with contextlib.suppress(OSError):
            try:
                _renew(path)
            except FileNotFoundError:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                draft = self.folder / f"{DRAFT}{uuid4().hex}"
                draft.touch(mode=0o600)
                _renew(draft)
                draft.rename(path)

    def leave(self, sandbox: str) -> None:
        (self.folder / sandbox).unlink(missing_ok=True)

    def taken(self) -> int:
        """Number of taken or reserved seats. Removes the files of seats that have become free."""
        return sum(self._is_held(path) for path in self._seats())

    def agents(self) -> int:
        """Number of seats with a sandbox. A reserved seat may still wait for its rollout."""
        named = [path for path in self._seats() if not path.name.startswith(RESERVED)]
        return sum(self._is_held(path) for path in named)

    def keep(self) -> None:
        """Renew every seat after a pause of this worker, so that its watchers have time to
        resume."""
        for path in self._seats():
            with contextlib.suppress(FileNotFoundError):
                _renew(path)

    def _is_still_full(self) -> bool:
        """Checks only the folder's mtime, which changes when a process leaves a seat."""
        if self._full is None or monotonic() - self._full[1] > LAPSED_LOOK_S:
            return False
        with contextlib.suppress(FileNotFoundError):
            return self.folder.stat().st_mtime_ns == self._full[0]
        return False

    def _seats(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if not path.name.startswith(DRAFT)]

    def _is_held(self, path: Path) -> bool:
        try:
            if path.name.startswith(RESERVED):
                held = _is_locked(path)
            else:
                # A time in the future means that the machine has rebooted since.
                held = -1 < monotonic() - path.stat().st_mtime < LAPSES_S
        except FileNotFoundError:
            return False
        if not held:
            path.unlink(missing_ok=True)
        return held

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Try the lock without waiting, because the process that holds it may be stopped."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def _renew(path: Path) -> None:
    """Set the mtime to the monotonic clock, which all processes share and no user can set."""
    now = monotonic()
    os.utime(path, (now, now))


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
