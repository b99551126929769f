"""A host's term: the period in which its sandboxes are valid.

A host that sends no heartbeat for too long loses its term. Its rollouts move to other hosts, and
its next term begins without the sandboxes of the previous one. Processes of the host read the term
from a file of the home. Other hosts read from the store which of its terms are over.
"""

import contextlib
import os
from pathlib import Path
from time import monotonic

from perdure.durable_files import write_file
from perdure.errors import NotFound, RetryHere
from perdure.storage import store_keys
from perdure.storage.base import Store

LONG_AGO = -1e9
"""A time on the monotonic clock that precedes any boot of the machine."""


class HostTerm:
    """The term of this home, as last confirmed to the process that sends the host's heartbeats.

    If no such process ever ran, there is no file, and nothing is refused.
    """

    def __init__(self, path: Path, silent_s: float) -> None:
        self._path, self._silent_s = path, silent_s

    @property
    def number(self) -> int:
        """0 before the first term. An empty file, which a power cut may leave, counts as none."""
        try:
            return int(self._path.read_text() or 0)
        except FileNotFoundError:
            return 0

    @property
    def is_confirmed(self) -> bool:
        """Whether sandboxes may be booted here: the term cannot be over yet."""
        try:
            silent = monotonic() - self._path.stat().st_mtime
        except FileNotFoundError:
            return True
        return -1 < silent < self._silent_s

    def check(self) -> None:
        """Raises: RetryHere if no sandbox may be booted here."""
        if not self.is_confirmed:
            raise RetryHere(
                "the server has not confirmed lately that this host is alive, so it boots no sandbox"
            )

    def begin(self, number: int) -> None:
        """Write the new term. No sandbox boots before the server confirms it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path, str(number), times=(LONG_AGO, LONG_AGO))

    def confirm(self) -> None:
        """Record that the server has just confirmed the term. The file's mtime is monotonic
        time."""
        if not self._path.exists() or not self._path.stat().st_size:
            self.begin(0)
        now = monotonic()
        os.utime(self._path, (now, now))

    def lapse(self) -> None:
        """Stop booting sandboxes, because the host leaves."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path, (LONG_AGO, LONG_AGO))


async def end_terms_before(store: Store, host: str, number: int) -> None:
    """Tell all hosts that the sandboxes of earlier terms of this host are gone.

    A server that was restored from a backup may name an older term. An ended term stays ended."""
    if number > await first_term(store, host):
        await store.put(store_keys.first_term(host), str(number).encode())


async def first_term(store: Store, host: str) -> int:
    """The host's first term that has not ended."""
    try:
        return int((await store.get(store_keys.first_term(host))).data)
    except NotFound:
        return 0
