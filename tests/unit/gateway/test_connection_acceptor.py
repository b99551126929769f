"""Connections that a gateway accepts."""

import asyncio
import socket

from perdure.gateway.http.connection_acceptor import Acceptor


async def test_small_writes_are_sent_at_once() -> None:
    """Without TCP_NODELAY, the body waits 40 ms after the header, because the two are separate
    writes."""
    connected: asyncio.Queue[asyncio.BaseTransport] = asyncio.Queue()

    class Told(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connected.put_nowait(transport)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Acceptor([listener], Told)
        acceptor.resume()
        _, writer = await asyncio.open_connection(*listener.getsockname())
        transport = await connected.get()
        end: socket.socket = transport.get_extra_info("socket")
        nodelay = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        acceptor.stop()
        transport.close()
        writer.close()
        await writer.wait_closed()

    assert nodelay
