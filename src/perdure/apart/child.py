"""The child: takes one request after the other from its socket, each within the same limits or none.

The limits are the kernel's, because a regular expression or an XML parser cannot be interrupted
otherwise. After a large request the child retires, so that memory is given back.
"""

import math
import os
import pickle
import resource
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure.errors import Boundary, RetryHere

CPU_S = 10
"""Seconds of CPU time for one request."""
MEMORY = 1 << 30
"""Bytes of address space that a child may take beyond what it starts with."""
LARGE = 256 << 20
"""Bytes of memory in use after which a child retires."""
ADDRESSES, RESIDENT = 0, 1
"""Columns of /proc/self/statm."""
OUT_OF_MEMORY = 77
"""Exit code."""
READY = b"r"
"""The first byte it sends: from now on, its end is the doing of what it reads."""
HEADER = struct.Struct("!Q??")
"""Length of the answer; whether it is a value, and not an exception; whether the child retires."""


class _Here:
    """Of this process."""

    is_child = False


def is_child() -> bool:
    """Whether this process is a child, which runs our own functions only."""
    return _Here.is_child


def main(*, limited: bool) -> None:
    """Serve the socket that is descriptor 0 until its other end is closed. `limited`: it reads a
    sandbox's bytes."""
    _Here.is_child = True
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's; its end ends this
    _give_way()
    if limited:
        _limit_memory()
    connection.sendall(READY)
    while (length := _take(connection, 8)) is not None:
        request = _take(connection, int.from_bytes(length))
        if request is None:
            return
        answer, is_value = _answer(request, limited=limited)
        del request
        retires = _memory(RESIDENT) > LARGE
        connection.sendall(HEADER.pack(len(answer), is_value, retires))
        connection.sendall(answer)
        if retires:
            return


def _give_way() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # a kernel in need ends the child, not its parent
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_memory() -> None:
    if size := _memory(ADDRESSES):
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def _memory(kind: int) -> int:
    """Bytes now; 0 where the system does not tell. `ru_maxrss` would begin at the worker's own."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(pages[kind]) * resource.getpagesize()


def _answer(request: bytes, *, limited: bool) -> tuple[bytes, bool]:
    try:
        function, arguments = _understood(request)
        if limited:
            _limit_cpu()
        return pickle.dumps(function(*arguments), pickle.HIGHEST_PROTOCOL), True
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        return _pickled(error), False


def _understood(request: bytes) -> Any:
    """Imports what the function needs. Raises: RetryHere; the bytes cannot be the cause."""
    try:
        return pickle.loads(request)
    except (ImportError, AttributeError) as error:
        said = f"a child process cannot import its function: {error}"
        raise RetryHere(said, boundary=Boundary.WORKER) from error


def _limit_cpu() -> None:
    """The kernel ends this process by SIGXCPU, whatever it is doing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _pickled(error: Exception) -> bytes:
    with suppress(Exception):
        pickled = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        pickle.loads(pickled)
        return pickled
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {str(error)[:1000]}"))


def _take(connection: socket.socket, size: int) -> Any:
    """Exactly so many bytes; None when the worker has gone."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        with suppress(InterruptedError):
            count = connection.recv_into(view[at:])
            if not count:
                return None
            at += count
    return data
