"""TCP ports that the kernel gives to no other process while a test uses them.

A port that was free a moment ago may be anybody's when a server binds it, or binds it again after
a kill: the kernel picks from the same range for every client and server of the host. One that is
bound and has no listener is given to no other process, but a server that names it may still bind
it.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from perdure.stack.stack_ports import LOOPBACK


@contextmanager
def held(count: int) -> Iterator[list[int]]:
    """So many ports, until the end of the context."""
    with ExitStack() as holders:
        yield [_hold(holders.enter_context(socket.socket())) for _ in range(count)]


def _hold(holder: socket.socket) -> int:
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK, 0))
    port: int = holder.getsockname()[1]
    if not _can_be_listened_on(port):
        holder.close()  # another kernel, which shares no port: as good as it gets there
    return port


def _can_be_listened_on(port: int) -> bool:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True
