"""The forwarder of a host without a gateway: it forwards sandbox connections to a gateway
elsewhere.

A symlink leads from the path of the gateway's unix socket to the forwarder's socket. A gateway that
starts in this home replaces the link. When that gateway has ended, the forwarder restores it.
"""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import structlog

from perdure.gateway.gateway_addresses import CONNECT_S, Gateways
from perdure.gateway.http.listening_sockets import BACKLOG, answers
from perdure.settings.settings_tree import Settings

NAME = "passage.sock"
LOOK_S = 5.0
"""Seconds between two checks for this home's own gateway."""
WAIT_S = 30.0
"""Seconds that a connection waits for a gateway before it is closed."""
PAUSE_S = 0.5
CHUNK = 1 << 16
SILENT_S = 30
"""Seconds after which the loss of a gateway's host is noticed without a FIN or RST from it."""

log = structlog.get_logger("perdure.gateway_proxy")


@asynccontextmanager
async def opened(settings: Settings, gateways: Gateways) -> AsyncIterator[None]:
    """Inside this context, the gateway socket of this home leads to a gateway."""
    path = settings.home.absolute() / "run" / NAME
    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(GatewayProxy(gateways).carry, path, backlog=BACKLOG)
    path.chmod(0o600)
    standing_in = asyncio.create_task(_stand_in(settings.gateway_socket))
    try:
        yield
    finally:
        standing_in.cancel()
        server.close()
        if settings.gateway_socket.is_symlink():
            settings.gateway_socket.unlink(missing_ok=True)
        path.unlink(missing_ok=True)


async def _stand_in(gateway: Path) -> None:
    """Keep the link in place while this home has no gateway."""
    dead = 0
    while True:
        with contextlib.suppress(OSError):  # a full disk
            kind = _kind(gateway)
            dead = dead + 1 if kind == stat.S_IFSOCK and not answers(gateway) else 0
            # A starting gateway binds its socket before it listens, so check twice.
            if kind is None or dead > 1:
                draft = gateway.with_name(f".{NAME}")
                draft.unlink(missing_ok=True)
                os.symlink(NAME, draft)
                draft.replace(gateway)
                log.info("no gateway in this home: forwarding its socket to other gateways")
        await asyncio.sleep(LOOK_S)


def _kind(path: Path) -> int | None:
    try:
        return stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return None


class GatewayProxy:
    def __init__(self, gateways: Gateways) -> None:
        self._gateways = gateways

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection of a sandbox until both ends are done."""
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await self._connect()
            await asyncio.gather(_copy(reader, far), _copy(far_reader, writer))
        except OSError:
            pass  # the client retries
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first gateway that accepts. Raises: OSError if none does."""
        until = monotonic() + WAIT_S
        while True:
            for url in await self._gateways.urls():
                parts = urlsplit(url)
                safe = parts.scheme == "https"
                try:
                    async with asyncio.timeout(CONNECT_S):
                        ends = await asyncio.open_connection(
                            parts.hostname, parts.port or (443 if safe else 80), ssl=safe or None
                        )
                except OSError as error:  # TimeoutError is an OSError
                    self._gateways.failed(url)
                    refused = error
                else:
                    _notice_loss(ends[1].get_extra_info("socket"))
                    return ends
            if monotonic() > until:
                raise refused
            await asyncio.sleep(PAUSE_S)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()


def _notice_loss(connection: socket.socket) -> None:
    """Set TCP keepalive. The other host's kernel answers it, even if its gateway is busy."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENT_S // 3),
        (socket.TCP_KEEPINTVL, SILENT_S // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
