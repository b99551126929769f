"""Limits the calls that one process works on at once, and the bytes of their bodies.

A call counts against its session, whose key is checked before a byte of the body is read. A call above
a limit waits with its body unread in the socket, so it neither fails nor takes memory. When too many
calls wait, the process stops accepting connections, and other processes of the pool accept them.
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
"""A body that has begun may always grow to this many bytes. Most bodies are smaller and soon complete."""
CALL_PREFIXES = ("/v1/", "/v1beta/")
"""Prefixes of the paths that agents call."""
SessionOf = Callable[[Mapping[str, str]], str | None]
"""The session whose key these headers hold; None if the key is missing or wrong."""


@dataclass(frozen=True)
class Limits:
    """Limits of one process."""

    calls: int = 2048
    """Most of them wait for an engine."""
    body_bytes: int = 96 << 20
    """A parsed body takes about twice its bytes until its call ends."""
    session_bytes: int = 32 << 20
    """Bytes of bodies that one session may hold: the size of the largest body."""
    body_s: float = 60.0
    """Seconds in which a whole body must arrive, not counting the time that it waits for room."""
    waiting: int = 1024
    """Waiting calls above which this process stops accepting connections."""


class _Body:
    """What has arrived of the body of one call."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.size = 0
        self.read_s = 0.0
        self.complete = False
        self.admitted = False


class CallLimiter:
    """ASGI middleware that limits agents' calls; all other requests pass at once."""

    def __init__(self, app: ASGIApp, session_of: SessionOf, limits: Limits = Limits()) -> None:
        self._app = app
        self._session_of = session_of
        self._limits = limits
        self._calls = self._bytes = 0
        self._of_session: Counter[str] = Counter()
        """By session: bytes of its bodies."""
        self._complete: Counter[str] = Counter()
        """By session: calls whose body is complete."""
        self._arriving: dict[_Body, None] = {}
        """Incomplete bodies, the oldest first."""
        self._room: deque[asyncio.Future[None]] = deque()
        """Bodies that wait for room to read on."""
        self._turns: deque[asyncio.Future[None]] = deque()
        """Calls with a complete body, in the order in which they will be admitted."""
        self._crowded = False
        self.on_crowded: Callable[[bool], None] = lambda crowded: None
        """Called with True when too many calls wait, and with False when that is over."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        called = scope["type"] == "http" and scope["method"] == "POST"
        if not called or not scope["path"].startswith(CALL_PREFIXES):
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
        """The next piece. Raises: Refused (408) if the body takes too long."""
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
            self._wake(self._room)  # another body is now the oldest
        return message

    def _may_read(self, body: _Body) -> bool:
        """Whether there is room. If only incomplete bodies fill it, the oldest of them may read on."""
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
        """Wait to be admitted, in the order in which bodies became complete."""
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
            elif queue is self._turns and not turn.cancelled():  # it was already admitted
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
