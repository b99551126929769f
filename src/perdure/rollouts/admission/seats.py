"""The seats of a home: how many rollouts may have an agent's sandbox there at once.

All worker processes of the home share them as files of one folder. A seat is reserved while a
sandbox is booted, then taken in the name of that sandbox. The worker that watches
the agent renews it. A seat that is not renewed is free again, so no crash can lose one.
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
"""Prefix of a seat for a sandbox that is being booted. Its file is locked while its process lives."""
DRAFT = "."
"""Prefix of a file that is no seat yet."""
LOCK = ".lock"
LAPSES_S = 120.0
"""Seconds after which a seat that was not renewed is free: longer than a watch pauses between two tries."""


LAPSED_LOOK_S = 5.0
"""Seconds between two looks at the age of every seat, while all are taken and none is left."""


TICK_NS = 100_000_000
"""Two changes of a folder within a kernel's tick may have the same time."""


class Reservation:
    """A seat for a sandbox that is being booted; free when released, or when this process dies."""

    def __init__(self, path: Path, locked: int) -> None:
        self._path = path
        self._unlock = weakref.finalize(self, os.close, locked)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._unlock()


class Seats:
    """`most`: how many there are."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._full: tuple[int, float] | None = None
        """The folder's change time at which all seats were found taken, and when that was."""

    def reserve(self) -> Reservation | None:
        """None: no seat is free, or another process is reserving one right now."""
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
        """Take a seat in the name of this sandbox, or renew it. On a full disk nothing happens."""
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
        """Seats that are taken or reserved; files of those that are free again are removed."""
        return sum(self._is_held(path) for path in self._seats())

    def agents(self) -> int:
        """Seats with a sandbox; a reserved one may still wait for its rollout."""
        named = [path for path in self._seats() if not path.name.startswith(RESERVED)]
        return sum(self._is_held(path) for path in named)

    def keep(self) -> None:
        """Renew every seat: after a pause of this worker, its watchers need a moment to come back."""
        for path in self._seats():
            with contextlib.suppress(FileNotFoundError):
                _renew(path)

    def _is_still_full(self) -> bool:
        """Without a look at each seat: whoever leaves one changes the folder."""
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
                # A time to come: the machine has started again since.
                held = -1 < monotonic() - path.stat().st_mtime < LAPSES_S
        except FileNotFoundError:
            return False
        if not held:
            path.unlink(missing_ok=True)
        return held

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Never waits: the process that holds the lock may be stopped."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def _renew(path: Path) -> None:
    """The file's time is the monotonic clock's, which all processes share and no user can set."""
    now = monotonic()
    os.utime(path, (now, now))


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
