"""Limits what one process works on at once: calls, and the bytes of their bodies.

A call over the limit waits with its body unread in the socket, so it neither fails nor takes memory.
When too many calls wait, the process stops accepting connections: other processes of the pool do.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True)
class Limits:
    """How much one process works on at once."""

    calls: int = 512
    body_bytes: int = 96 << 20
    """Parsed, a body takes about twice its bytes for as long as its call lasts."""
    waiting: int = 1024
    """Calls that may wait in this process before it stops accepting connections."""
    unannounced_bytes: int = 32 << 20
    """The size assumed for a body without content-length: the largest allowed."""


class CallLimiter:
    """ASGI middleware: agents' calls are limited, everything else passes at once."""

    def __init__(self, app: ASGIApp, limits: Limits = Limits()) -> None:
        self._app = app
        self._limits = limits
        self._calls = self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._crowded = False
        self.on_crowded: Callable[[bool], None] = lambda crowded: None
        """Called when too many calls wait, and again when that is over."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"][:4] != "/v1/":
            await self._app(scope, receive, send)
            return
        size = self._announced(scope)
        await self._enter(size)
        try:
            await self._app(scope, receive, send)
        finally:
            self._leave(size)

    def _announced(self, scope: Scope) -> int:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                return int(value)
        return self._limits.unannounced_bytes

    async def _enter(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self._take(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        self._tell()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(size)
            else:
                self._waiting.remove(entry)
                self._admit()
            raise

    def _leave(self, size: int) -> None:
        self._calls -= 1
        self._bytes -= size
        self._admit()

    def _admit(self) -> None:
        """In the order of arrival, so that a large body does not wait for ever."""
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            self._take(size)
            turn.set_result(None)
        self._tell()

    def _fits(self, size: int) -> bool:
        # A body above the limit is admitted when no other call runs; the handler then refuses it.
        alone = self._calls == 0
        limits = self._limits
        return alone or (self._calls < limits.calls and self._bytes + size <= limits.body_bytes)

    def _take(self, size: int) -> None:
        self._calls += 1
        self._bytes += size

    def _tell(self) -> None:
        crowded = len(self._waiting) >= self._limits.waiting
        if crowded != self._crowded:
            self._crowded = crowded
            self.on_crowded(crowded)
