"""Calls a function on bytes from a sandbox, in a child process of this worker.

Children are kept warm for a while. One serves one request at a time, so that its limits are that
request's; the next is started when those at work do not end within a moment.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from perdure.errors import Boundary, ConfigurationError, PerdureError, RetryHere
from perdure.untrusted.child import CPU_S, HEADER, MEMORY, OUT_OF_MEMORY, READY

WALL_S = 300.0
"""Seconds for one request. The CPU limit ends a hostile one long before, so a host that needs longer
is starved."""
START_S = 120.0
"""Seconds for a child's start, on a busy host."""
IDLE_S = 60.0
"""Seconds without a request after which a child ends."""
MOST = max(2, os.cpu_count() or 1)
"""Children at a time."""

PATIENCE_S = 0.2
"""Seconds to wait for a child at work. Most requests take a millisecond; a child's start takes 300 of CPU."""

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Unparsable(Exception):
    """What the sandbox wrote cannot be read within the limits. This is a verdict on it: reading it
    again would end the same."""


async def read(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)`, in a child. Its own PerdureErrors and Unparsable pass through.

    Raises: Unparsable; RetryHere when the host gives a child no time; ConfigurationError.
    """
    assert not kwargs, "a request has positional arguments only"
    try:
        request = pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{function!r} runs in another process: it and its class must be a module's own: {error}"
        ) from error
    async with _seats():
        try:
            return cast(T, await _ask(request))
        except _EndedFromOutside:
            pass  # perhaps the kernel, for want of memory: once more, then it is the input's doing
        try:
            return cast(T, await _ask(request))
        except _EndedFromOutside as error:
            raise Unparsable(f"reading it was ended twice by signal {error.args[0]}") from None


async def _ask(request: bytes) -> Any:
    child = await _free()
    try:
        async with asyncio.timeout(WALL_S):
            answer, is_value, retires = await child.ask(request)
    except TimeoutError:
        child.end()
        raise RetryHere(
            f"reading a sandbox's output took over {WALL_S:.0f} s of a starved host",
            boundary=Boundary.WORKER,
        ) from None
    except OSError:
        raise await asyncio.to_thread(child.cause) from None
    except BaseException:
        child.end()
        raise
    if retires:
        child.end()
    else:
        _give_back(child)
    found = pickle.loads(answer)
    if is_value:
        return found
    if isinstance(found, (PerdureError, Unparsable)):
        raise found
    _log.error("a sandbox's output broke its reader", exc_info=found)
    raise Unparsable(f"reading it failed: {type(found).__name__}: {str(found)[:200]}") from found


async def _free() -> "_Child":
    """One that is idle or soon will be, else a new one."""
    if _alive and not _idle:
        turn: asyncio.Future[_Child] = asyncio.get_running_loop().create_future()
        _waiting.append(turn)
        try:
            await asyncio.wait((turn,), timeout=PATIENCE_S)
        except asyncio.CancelledError:
            if turn.done():
                _give_back(turn.result())
            raise
        finally:
            _waiting.remove(turn)
        if turn.done():
            return turn.result()
    return _idle.pop() if _idle else await _started()


def _give_back(child: "_Child") -> None:
    """To who has waited longest."""
    turn = next((turn for turn in _waiting if not turn.done()), None)
    if turn is None:
        _keep_warm(child)
    else:
        turn.set_result(child)


def _keep_warm(child: "_Child") -> None:
    """For the next request, unless none comes: a child holds 26 MB."""
    child.served += 1
    _idle.append(child)
    asyncio.get_running_loop().call_later(IDLE_S, _end_unless_used, child, child.served)


def _end_unless_used(child: "_Child", served: int) -> None:
    if child in _idle and child.served == served:
        _idle.remove(child)
        child.end()


async def _started() -> "_Child":
    """A new child; who is cancelled meanwhile leaves it to the next."""
    starting = asyncio.ensure_future(asyncio.to_thread(_Child))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(
            lambda done: None if done.exception() else _give_back(done.result())
        )
        raise


class _EndedFromOutside(Exception):
    """By a signal that its limits do not send."""


_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from perdure.untrusted.child import main; main()"
)


class _Child:
    """A process that knows this one's modules, and the socket to it. No event loop owns it."""

    def __init__(self) -> None:
        """Raises: RetryHere when the host has no room for a process."""
        self.served = 0
        self._socket, theirs = socket.socketpair()
        argv = [sys.executable, "-c", _START, json.dumps(sys.path)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
                )
        except OSError as error:
            self._socket.close()
            raise RetryHere(f"cannot start a reader: {error}", boundary=Boundary.WORKER) from error
        self._socket.settimeout(START_S)
        _alive.add(self)
        try:
            ready = self._socket.recv(1)
        except TimeoutError:
            ready = b""
        if ready != READY:
            self.end()
            raise RetryHere("a reader did not start; see the log", boundary=Boundary.WORKER)
        self._socket.setblocking(False)

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
        self.end()
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return Unparsable(f"reading it takes more than {CPU_S} s of CPU time")
        if code == OUT_OF_MEMORY:
            return Unparsable(f"reading it takes more than {MEMORY >> 20} MiB of memory")
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, 0):
            return _EndedFromOutside(-code)
        return Unparsable(f"reading it ended its process with {code}")

    def end(self) -> None:
        """At once; nothing of it is left."""
        _alive.discard(self)
        self._socket.close()
        self._process.kill()
        self._process.wait()


_alive: set[_Child] = set()
_idle: list[_Child] = []
_waiting: list[asyncio.Future[_Child]] = []
_seats_of: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _seats() -> asyncio.Semaphore:
    """One for each event loop, because a semaphore belongs to its loop."""
    return _seats_of.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST))


@atexit.register
def end_all() -> None:
    """End the children. A process that ends by `os._exit` must call it, or they end a moment later."""
    for child in list(_alive):
        child.end()
