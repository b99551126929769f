"""Calls a function on bytes that hostile code wrote, in a child process with limits.

The kernel enforces the limits, because a regular expression or an XML parser cannot be interrupted
otherwise. A child serves one call at a time and stays warm for the next ones. Its failure costs
only the call that it serves. So each child has its own connection: the children of pebble's pool
share one, and a child that is killed while it writes stops all others.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from perdure.errors import Boundary, ConfigurationError, PerdureError, RetryHere

CPU_S = 10
"""Seconds of CPU time for one call."""
MEMORY = 1 << 30
"""Bytes of address space that a child may allocate in addition to its initial size."""
WALL_S = 300.0
"""Seconds for one call, including the child's start. The CPU limit ends a hostile call long before,
so a call that reaches this limit ran on a starved host."""
LARGE = 256 << 20
"""Bytes of resident memory above which a child is ended after its call."""
IDLE_S = 60.0
"""Seconds without a call after which a child is ended."""
MOST = max(2, (os.cpu_count() or 1) // 2)
"""Maximum number of children. Most calls take 1 ms, and a child's start takes 300 ms of CPU
time."""
ADDRESSES, RESIDENT = 0, 1
"""Columns of /proc/PID/statm."""
OUT_OF_MEMORY = 77
"""Exit code of a child without memory."""
READY = b"ready"
"""A child's first message. If it ends after that, its input is the cause."""

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Unparsable(Exception):
    """The sandbox's output cannot be read within the limits. This is a verdict, because another
    read would fail the same way."""


async def read(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function(*args)` in a child. PerdureErrors and Unparsable of the function pass through.

    Raises: Unparsable; RetryHere if the host lacks memory or time for a child, or ends it;
    ConfigurationError if `function` is not defined at module level.
    """
    assert not kwargs, "a call has positional arguments only"
    request = _request(function, args)
    async with _seats():
        try:
            is_value, found = await _ask(request)
        except _EndedFromOutside:  # perhaps the kernel's OOM killer: try once more
            is_value, found = await _ask_again(request)
    if is_value:
        return cast(T, found)
    if isinstance(found, (PerdureError, Unparsable)):
        raise found
    _log.error("a sandbox's output broke its reader", exc_info=found)
    raise Unparsable(f"reading it failed: {type(found).__name__}: {str(found)[:200]}") from found


@atexit.register
def end_all() -> None:
    """End all children. A process that exits by `os._exit` must call this, or they end a moment
    later."""
    _idle.clear()
    while _alive:
        _alive.pop().end()


# --- the parent's side -----------------------------------------------------------------------------


class _EndedFromOutside(Exception):
    """A signal that the limits do not send has ended the child."""


_START = (
    "import json, sys; sys.path[:], limits = map(json.loads, sys.argv[1:]); "
    "from perdure.limited_process import serve; serve(*limits)"
)


class _Child:
    """A child process with this process's module path, and the connection to it."""

    def __init__(self) -> None:
        """Raises: RetryHere if the host cannot start a process."""
        self.calls = 0
        self._is_ready = False
        self._connection, theirs = Pipe()
        argv = [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps([CPU_S, MEMORY])]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
                )
        except OSError as error:
            self._connection.close()
            raise RetryHere(
                f"cannot start a child process: {error}", boundary=Boundary.WORKER
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: bytes) -> tuple[bool, Any]:
        """Returns whether the function returned, and its value or its exception. Blocks.

        Raises: Unparsable, RetryHere or _EndedFromOutside if the child ends without an answer.
        """
        self.calls += 1
        try:
            self._is_ready = self._is_ready or self._connection.recv_bytes() == READY
            self._connection.send_bytes(request)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._cause() from None
        return cast(tuple[bool, Any], pickle.loads(answer))

    def is_large(self) -> bool:
        return _memory(self.pid, RESIDENT) > LARGE

    def end(self) -> None:
        """Kill and reap the child. A thread that waits for its answer gets an error."""
        self._process.kill()
        self._process.wait()

    def _cause(self) -> Exception:
        """The error for a child that ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        if not self._is_ready:
            return RetryHere("a child process did not start; see the log", boundary=Boundary.WORKER)
        if code == -signal.SIGXCPU:
            return Unparsable(f"reading it takes more than {CPU_S} s of CPU time")
        if code == OUT_OF_MEMORY:
            return Unparsable(f"reading it takes more than {MEMORY >> 20} MiB of memory")
        if code in (None, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, 0):
            return _EndedFromOutside(signal.SIGKILL if code is None else -code)
        return Unparsable(f"reading it ended the process with code {code}")


_alive: set[_Child] = set()
_idle: list[_Child] = []
_threads = ThreadPoolExecutor(MOST, "limited-process")
"""Threads that wait for children. Children belong to no event loop: a process may have several
loops."""
_seats_of: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _request(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{function!r} runs in another process, so it must be defined at module level: {error}"
        ) from error


def _seats() -> asyncio.Semaphore:
    """The semaphore of this event loop. Each loop needs its own."""
    return _seats_of.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST))


async def _ask(request: bytes) -> tuple[bool, Any]:
    child = _idle.pop() if _idle else _Child()
    _alive.add(child)
    loop, is_kept = asyncio.get_running_loop(), False
    try:
        async with asyncio.timeout(WALL_S):
            answer = await loop.run_in_executor(_threads, child.ask, request)
        is_kept = not child.is_large()
    except TimeoutError:
        raise RetryHere(
            f"a call in a child process took over {WALL_S:.0f} s: this host is starved",
            boundary=Boundary.WORKER,
        ) from None
    finally:
        if is_kept:
            _idle.append(child)
            loop.call_later(IDLE_S, _end_unless_called, child, child.calls)
        else:
            _end(child)
    return answer


async def _ask_again(request: bytes) -> tuple[bool, Any]:
    try:
        return await _ask(request)
    except _EndedFromOutside as error:
        raise RetryHere(
            f"signal {error.args[0]}, which none of its limits sends, ended a child process twice",
            boundary=Boundary.WORKER,
        ) from None


def _end_unless_called(child: _Child, calls: int) -> None:
    if child in _idle and child.calls == calls:
        _idle.remove(child)
        _end(child)


def _end(child: _Child) -> None:
    _alive.discard(child)
    child.end()


# --- the child's side ------------------------------------------------------------------------------


def serve(cpu_s: int, memory: int) -> None:
    """Answer requests on descriptor 0, one at a time, until the other end is closed."""
    connection = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; its exit ends this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # the OOM killer must choose the child, not its parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    _limit_memory(memory)
    connection.send_bytes(READY)
    try:
        while True:
            connection.send_bytes(_answer(connection.recv_bytes(), cpu_s))
    except (EOFError, OSError):  # the parent has ended
        return
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _answer(request: bytes, cpu_s: int) -> bytes:
    """Raises: MemoryError."""
    try:
        function, args = _understood(request)
        _limit_cpu(cpu_s)
        return pickle.dumps((True, function(*args)), pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:
        return _pickled(error)


def _understood(request: bytes) -> Any:
    """Import the function. Raises: RetryHere, because the sandbox's bytes cannot be the cause."""
    try:
        return pickle.loads(request)
    except (ImportError, AttributeError) as error:
        said = f"a child process cannot import its function: {error}"
        raise RetryHere(said, boundary=Boundary.WORKER) from error


def _pickled(error: Exception) -> bytes:
    with contextlib.suppress(Exception):
        pickled = pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
        pickle.loads(pickled)
        return pickled
    return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {str(error)[:1000]}")))


def _limit_memory(most: int) -> None:
    if size := _memory(os.getpid(), ADDRESSES):
        resource.setrlimit(resource.RLIMIT_AS, (size + most, size + most))


def _limit_cpu(seconds: int) -> None:
    """Let the kernel end this process by SIGXCPU, even inside a C call."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _memory(pid: int, column: int) -> int:
    """Current bytes; 0 if the system does not say. `ru_maxrss` would start at the parent's
    value."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(pages[column]) * resource.getpagesize()
