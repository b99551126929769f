"""Accepts connections from listening sockets one at a time, and can be paused.

asyncio's own servers accept a whole queue at once, which starves the other processes in a pool.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence

import structlog

NO_DESCRIPTORS_PAUSE_S = 1.0
"""Seconds to pause after accept failed for lack of descriptors or memory, so that another process accepts
the connection."""

log = structlog.get_logger()


class Acceptor:
    """Accepts on `listeners` until `stop`. Each connection gets a protocol from `factory`."""

    def __init__(
        self, listeners: Sequence[socket.socket], factory: Callable[[], asyncio.Protocol]
    ) -> None:
        self._listeners = listeners
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = self._stopped = False

    def resume(self) -> None:
        if self._accepting or self._stopped:
            return
        self._accepting = True
        for listener in self._listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def pause(self) -> None:
        """Leave new connections in the kernel's queue, where other processes accept them."""
        if self._accepting:
            self._accepting = False
            for listener in self._listeners:
                self._loop.remove_reader(listener.fileno())

    def stop(self) -> None:
        self.pause()
        self._stopped = True

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process accepted it, or the caller disconnected
        except OSError as error:
            log.error("cannot accept a connection", error=str(error))
            self.pause()
            self._loop.call_later(NO_DESCRIPTORS_PAUSE_S, self.resume)
            return
        connection.setblocking(False)
        if (
            connection.family != socket.AF_UNIX
        ):  # asyncio sets it only if the listener's protocol is TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._factory, connection)
        except OSError as error:
            connection.close()
            log.info("connection lost while being accepted", error=str(error))
