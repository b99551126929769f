"""A TCP connection between two parts, which a test can cut, silence and slow down."""

import asyncio
import contextlib
import socket
import struct
from enum import StrEnum

PIECE = 16384
SLOW_S = 0.2
"""Seconds before each piece of a slow wire."""


class Fault(StrEnum):
    """What a wire does to the bytes on it."""

    RESET = "reset"
    """Ends every connection, and each new one."""
    BLACK_HOLE = "black_hole"
    """Accepts and carries nothing; both ends wait."""
    SLOW = "slow"


class Wire:
    """Listens on a loopback port of its own and carries bytes to `port`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._fault: Fault | None = None
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._cut()

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def play(self, fault: Fault) -> None:
        self._fault = fault
        self._changed.set()
        self._changed = asyncio.Event()
        if fault is Fault.RESET:
            self._cut()

    def heal(self) -> None:
        """Carry bytes again. What was silenced is cut: its ends have waited long enough."""
        if self._fault is Fault.BLACK_HOLE:
            self._cut()
        self._fault = None
        self._changed.set()
        self._changed = asyncio.Event()

    def _cut(self) -> None:
        for writer in [*self._writers]:
            raw: socket.socket | None = writer.get_extra_info("socket")
            if raw is not None:
                with contextlib.suppress(OSError):
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault is Fault.RESET:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            self._writers -= {writer, back}
            writer.close()
            back.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE):
                while self._fault is Fault.BLACK_HOLE:
                    await self._changed.wait()
                if self._fault is Fault.SLOW:
                    await asyncio.sleep(SLOW_S)
                sink.write(data)
                await sink.drain()
            sink.write_eof()
