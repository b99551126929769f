"""Limits what one process works on at once: calls, and the bytes of their bodies.

A call is counted against its session, whose key is checked before a byte of the body is read. What
is over a limit waits with its body unread in the socket, so it neither fails nor takes memory. When
too many calls wait, the process stops accepting connections: other processes of the pool do.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.dialects.base import Refused

SMALL = 256 << 10
"""A body that has begun may always grow to this many bytes: most are smaller, and soon complete."""
SessionOf = Callable[[Mapping[str, str]], str | None]
"""The session whose key these headers hold; None when the key is missing or wrong."""


@dataclass(frozen=True)
class Limits:
    """How much one process works on at once."""

    calls: int = 2048
    """Most of them wait for an engine."""
    body_bytes: int = 96 << 20
    """A parsed body takes about twice its bytes until its call ends."""
    session_bytes: int = 32 << 20
    """Of these bytes, as many as one session may hold: the size of the largest body."""
    body_s: float = 60.0
    """Seconds for a whole body to arrive, not counting the time in which it waits for room."""
    waiting: int = 1024
    """Calls that may wait in this process before it stops accepting connections."""


class _Body:
    """The body of one call, as far as it has arrived."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.size = 0
        self.read_s = 0.0
        self.complete = False
        self.admitted = False


class CallLimiter:
    """ASGI middleware: agents' calls are limited, everything else passes at once."""

    def __init__(self, app: ASGIApp, session_of: SessionOf, limits: Limits = Limits()) -> None:
        self._app = app
        self._session_of = session_of
        self._limits = limits
        self._calls = self._bytes = 0
        self._of_session: Counter[str] = Counter()
        """Bytes of bodies, by session."""
        self._complete: Counter[str] = Counter()
        """Calls whose body is complete, by session."""
        self._arriving: dict[_Body, None] = {}
        """Bodies that are not complete, the oldest first."""
        self._room: deque[asyncio.Future[None]] = deque()
        """What waits for room to read on."""
        self._turns: deque[asyncio.Future[None]] = deque()
        """Calls whose body is complete, in the order in which they will be worked on."""
        self._crowded = False
        self.on_crowded: Callable[[bool], None] = lambda crowded: None
        """Called when too many calls wait, and again when that is over."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"][:4] != "/v1/":
            return await self._app(scope, receive, send)
        session = self._session_of(Headers(scope=scope))
        if session is None:  # the app refuses it without reading its body
            return await self._app(scope, receive, send)
        body = _Body(session)
        self._arriving[body] = None

        async def limited() -> Message:
            if body.complete:
                return await receive()
            message = await self._read(body, receive)
            if body.complete:
                await self._enter(body)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._leave(body)

    # --- bodies --------------------------------------------------------------------------------

    async def _read(self, body: _Body, receive: Receive) -> Message:
        """The next piece. Raises: Refused (408) when the body takes too long."""
        while not self._may_read(body):
            await self._wait(self._room)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.body_s - body.read_s):
                message = await receive()
        except TimeoutError:
            problem = f"the request's body did not arrive within {self._limits.body_s:g} s"
            raise Refused(408, "request_timeout", problem) from None
        body.read_s += time.monotonic() - started
        self._book(body, len(message.get("body", b"")))
        if not message.get("more_body", False):
            body.complete = True
            self._complete[body.session] += 1
            del self._arriving[body]
            self._wake(self._room)  # another body is the oldest now
        return message

    def _may_read(self, body: _Body) -> bool:
        """Whether there is room. If bodies that are not complete fill it, the oldest of them reads on."""
        limits = self._limits
        if 0 < body.size < SMALL:
            return True
        if self._bytes >= limits.body_bytes:
            return not self._complete and body is next(iter(self._arriving))
        if self._of_session[body.session] >= limits.session_bytes:
            own = (one for one in self._arriving if one.session == body.session)
            return not self._complete[body.session] and body is next(own)
        return True

    def _book(self, body: _Body, size: int) -> None:
        body.size += size
        self._bytes += size
        self._of_session[body.session] += size

    # --- calls ---------------------------------------------------------------------------------

    async def _enter(self, body: _Body) -> None:
        """Wait for a place among the calls, in the order in which bodies became complete."""
        if self._turns or self._calls >= self._limits.calls:
            await self._wait(self._turns)
        else:
            self._calls += 1
        body.admitted = True

    def _leave(self, body: _Body) -> None:
        self._arriving.pop(body, None)
        self._book(body, -body.size)
        if body.complete:
            self._complete[body.session] -= 1
        for counter in (self._of_session, self._complete):
            if not counter[body.session]:
                del counter[body.session]
        if body.admitted:
            self._calls -= 1
        self._admit()
        self._wake(self._room)

    def _admit(self) -> None:
        while self._turns and self._calls < self._limits.calls:
            turn = self._turns.popleft()
            if not turn.done():
                self._calls += 1
                turn.set_result(None)
        self._tell()

    # --- waiting -------------------------------------------------------------------------------

    async def _wait(self, queue: "deque[asyncio.Future[None]]") -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._tell()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in queue:
                queue.remove(turn)
            elif queue is self._turns and not turn.cancelled():  # it was given a place already
                self._calls -= 1
                self._admit()
            self._tell()
            raise

    def _wake(self, queue: "deque[asyncio.Future[None]]") -> None:
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
        self._tell()

    def _tell(self) -> None:
        crowded = len(self._turns) + len(self._room) >= self._limits.waiting
        if crowded != self._crowded:
            self._crowded = crowded
            self.on_crowded(crowded)
