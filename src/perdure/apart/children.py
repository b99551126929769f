"""Child processes of this one, each of which calls one function at a time and hands its value back.

Children are kept warm for a while. The next one is started when those at work do not end within a
moment. Those that read a sandbox's bytes have limits, and never see anything else.
"""

import asyncio
import atexit
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from perdure.apart.child import CPU_S, HEADER, MEMORY, OUT_OF_MEMORY, READY
from perdure.errors import Boundary, ConfigurationError, RetryHere

WALL_S = 300.0
"""Seconds for one request. The CPU limit ends a hostile one long before, so a host that needs longer
is starved."""
START_S = 120.0
"""Seconds for a child's start, on a busy host."""
IDLE_S = 60.0
"""Seconds without a request after which a child ends."""
MOST = max(2, os.cpu_count() or 1)
"""Children at a time, of each kind."""
PATIENCE_S = 0.2
"""Seconds to wait for a child at work. Most requests take a millisecond; a child's start takes 300 of CPU."""


class Overrun(Exception):
    """A request took more than its limits, or its process ended."""


class Answer(NamedTuple):
    """What the function gave, or the exception that it raised."""

    found: Any
    is_value: bool


class Children:
    """Children of one kind. No event loop owns them: several loops of a process may ask."""

    def __init__(self, *, limited: bool) -> None:
        self.idle: list[Child] = []
        self._limited = limited
        self._alive: set[Child] = set()
        self._waiting: list[asyncio.Future[Child]] = []
        self._seats_of: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        _all.add(self)

    async def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Answer:
        """Raises: Overrun; RetryHere when the host gives a child no time or ends it; ConfigurationError."""
        try:
            request = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"{function!r} runs in another process: it and its class must be a module's own: {error}"
            ) from error
        async with self._seats():
            try:
                return await self._ask(request)
            except _EndedFromOutside:
                pass  # perhaps the kernel, for want of memory: once more
            try:
                return await self._ask(request)
            except _EndedFromOutside as error:
                raise RetryHere(
                    f"a child process was ended twice by signal {error.args[0]}, which none of its "
                    "limits sends",
                    boundary=Boundary.WORKER,
                ) from None

    def end_all(self) -> None:
        for child in list(self._alive):
            self.end(child)

    def end(self, child: "Child") -> None:
        self._alive.discard(child)
        child.end()

    def _seats(self) -> asyncio.Semaphore:
        """One for each event loop, because a semaphore belongs to its loop."""
        return self._seats_of.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST))

    async def _ask(self, request: bytes) -> Answer:
        child = await self._free()
        try:
            async with asyncio.timeout(WALL_S):
                answer, is_value, retires = await child.ask(request)
        except TimeoutError:
            self.end(child)
            raise RetryHere(
                f"a call in another process took over {WALL_S:.0f} s of a starved host",
                boundary=Boundary.WORKER,
            ) from None
        except OSError:
            try:
                cause = await asyncio.to_thread(child.cause)
            finally:
                self.end(child)
            raise cause from None
        except BaseException:
            self.end(child)
            raise
        if retires:
            self.end(child)
        else:
            self._give_back(child)
        return Answer(pickle.loads(answer), is_value)

    async def _free(self) -> "Child":
        """One that is idle or soon will be, else a new one."""
        if self._alive and not self.idle:
            turn: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await asyncio.wait((turn,), timeout=PATIENCE_S)
            except asyncio.CancelledError:
                if turn.done():
                    self._give_back(turn.result())
                raise
            finally:
                self._waiting.remove(turn)
            if turn.done():
                return turn.result()
        return self.idle.pop() if self.idle else await self._started()

    def _give_back(self, child: "Child") -> None:
        """To who has waited longest."""
        turn = next((turn for turn in self._waiting if not turn.done()), None)
        if turn is None:
            self._keep_warm(child)
        else:
            turn.set_result(child)

    def _keep_warm(self, child: "Child") -> None:
        """For the next request, unless none comes: a child holds 26 MB or more."""
        child.served += 1
        self.idle.append(child)
        loop = asyncio.get_running_loop()
        loop.call_later(IDLE_S, self._end_unless_used, child, child.served)

    def _end_unless_used(self, child: "Child", served: int) -> None:
        if child in self.idle and child.served == served:
            self.idle.remove(child)
            self.end(child)

    async def _started(self) -> "Child":
        """A new child; who is cancelled meanwhile leaves it to the next."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(
                lambda done: None if done.exception() else self._give_back(done.result())
            )
            raise

    def _start(self) -> "Child":
        """Raises: RetryHere when the host has no room for a process."""
        child = Child(limited=self._limited)
        self._alive.add(child)
        if not child.is_ready():
            self.end(child)
            raise RetryHere("a child did not start; see the log", boundary=Boundary.WORKER)
        return child


class _EndedFromOutside(Exception):
    """By a signal that its limits do not send."""


_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from perdure.apart.child import main; main(limited=json.loads(sys.argv[2]))"
)


class Child:
    """A process that knows this one's modules, and the socket to it."""

    def __init__(self, *, limited: bool) -> None:
        """Raises: RetryHere when the host has no room for a process."""
        self.served = 0
        self._limited = limited
        self._socket, theirs = socket.socketpair()
        argv = [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps(limited)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
                )
        except OSError as error:
            self._socket.close()
            raise RetryHere(f"cannot start a child: {error}", boundary=Boundary.WORKER) from error

    def is_ready(self) -> bool:
        """Wait until it has started. False: it did not."""
        self._socket.settimeout(START_S)
        try:
            ready = self._socket.recv(1)
        except TimeoutError:
            ready = b""
        self._socket.setblocking(False)
        return ready == READY

    async def ask(self, request: bytes) -> tuple[bytes, bool, bool]:
        """Raises: OSError when the child has ended."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, len(request).to_bytes(8))
        await loop.sock_sendall(self._socket, request)
        length, is_value, retires = HEADER.unpack(await self._take(HEADER.size))
        return await self._take(length), is_value, retires

    async def _take(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = await loop.sock_recv_into(self._socket, view[at:])
            if not count:
                raise ConnectionResetError("the child has ended")
            at += count
        return bytes(data)

    def cause(self) -> Exception:
        """Why it ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        if code == -signal.SIGXCPU:
            return Overrun(f"it takes more than {CPU_S} s of CPU time")
        if code == OUT_OF_MEMORY:
            most = f"{MEMORY >> 20} MiB of memory" if self._limited else "the host's memory"
            return Overrun(f"it takes more than {most}")
        if code in (None, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, 0):
            return _EndedFromOutside(signal.SIGKILL if code is None else -code)
        return Overrun(f"it ended its process with {code}")

    def end(self) -> None:
        """At once; nothing of it is left."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


_all: WeakSet[Children] = WeakSet()


@atexit.register
def end_all() -> None:
    """End the children. A process that ends by `os._exit` must call it, or they end a moment later."""
    for children in list(_all):
        children.end_all()
