"""Closes connections that are idle, or whose request head never ends."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

IDLE_S = 90.0
"""Seconds that a connection may stay without a complete request head. Clients close idle ones sooner."""
LOOK_EVERY_S = 5.0


class IdleConnections:
    """Tracks since when each connection of a server has had no request."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._look_at = 0.0
        self._since: WeakKeyDictionary[Any, tuple[Any, float]] = WeakKeyDictionary()
        """By idle connection: its last request, and when it was first seen idle after it."""

    def close_old(self, connections: Iterable[Any], now: float) -> None:
        """Close the connections that have been idle too long. `connections`: uvicorn's HTTP protocols."""
        if now < self._look_at:
            return
        self._look_at = now + min(LOOK_EVERY_S, self._idle_s)
        for connection in list(connections):
            last = connection.cycle
            if last is not None and not last.response_complete:
                self._since.pop(connection, None)
                continue
            known, since = self._since.get(connection, (last, now))
            if known is not last:
                since = now
            self._since[connection] = (last, since)
            if now - since >= self._idle_s:
                connection.transport.close()
