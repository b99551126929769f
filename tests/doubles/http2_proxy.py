"""TLS and HTTP/2 in front of a double, as its service has them: `async with behind_http2(url, tls)`.

Owns only the protocol. It carries out a rule's `goaway`: the server sends GOAWAY with the last
request that it has handled, and closes. HTTP/1.1 is passed through.
"""

import asyncio
import contextlib
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError

from tests.doubles.fault_rules import BEHIND_HTTP2, GOAWAY

PIECE = 1 << 16
NOT_ACROSS = {"connection", "transfer-encoding", "keep-alive", "host", "content-length"}
"""Headers of one connection, not of the message."""


class _Request:
    def __init__(self, headers: list[tuple[str, str]]) -> None:
        self.headers = [(k, v) for k, v in headers if k[0] != ":" and k not in NOT_ACROSS]
        self.pseudo = {k: v for k, v in headers if k[0] == ":"}
        self.body = bytearray()


class _Connection:
    """One client's connection; each of its requests is a task."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        backend: aiohttp.ClientSession,
    ) -> None:
        self.reader, self.writer, self.backend = reader, writer, backend
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.requests: dict[int, _Request] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.news = asyncio.Event()

    async def serve(self) -> None:
        self.h2.initiate_connection()
        await self._flush()
        try:
            while data := await self.reader.read(PIECE):
                for event in self.h2.receive_data(data):
                    self._meet(event)
                self.news.set()
                await self._flush()
        except (ProtocolError, ConnectionError):
            return
        finally:
            for task in self.tasks.values():
                task.cancel()

    def _meet(self, event: object) -> None:
        if isinstance(event, RequestReceived):
            assert event.headers is not None
            headers = [(str(k), str(v)) for k, v in event.headers]
            self.requests[event.stream_id] = _Request(headers)
        elif isinstance(event, DataReceived):
            self.requests[event.stream_id].body += event.data or b""
            self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        elif isinstance(event, StreamEnded):
            number = event.stream_id
            self.tasks[number] = asyncio.create_task(self._carry(number))
        elif isinstance(event, StreamReset):
            if (task := self.tasks.pop(event.stream_id, None)) is not None:
                task.cancel()
        elif isinstance(event, ConnectionTerminated):
            raise ConnectionError

    async def _carry(self, number: int) -> None:
        request = self.requests.pop(number)
        try:
            async with self.backend.request(
                request.pseudo[":method"],
                request.pseudo[":path"],
                headers=request.headers,
                data=io.BytesIO(request.body),
            ) as answer:
                if GOAWAY in answer.headers:
                    await self._go_away(number, answer.headers[GOAWAY] == "after")
                    return
                kept = [(k.lower(), v) for k, v in answer.headers.items()]
                kept = [(k, v) for k, v in kept if k not in NOT_ACROSS]
                self.h2.send_headers(number, [(":status", str(answer.status)), *kept])
                async for piece in answer.content.iter_any():
                    await self._send(number, piece)
            self.h2.end_stream(number)
        except aiohttp.ClientError:
            with contextlib.suppress(ProtocolError):
                self.h2.reset_stream(number, ErrorCodes.INTERNAL_ERROR)
        except ProtocolError:
            return  # the client has left this stream, or the connection
        await self._flush()

    async def _send(self, number: int, data: bytes) -> None:
        while data:
            self.news.clear()
            room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if room <= 0:
                await self.news.wait()
                continue
            self.h2.send_data(number, data[:room])
            data = data[room:]
            await self._flush()

    async def _go_away(self, number: int, seen_to: bool) -> None:
        self.h2.close_connection(last_stream_id=number if seen_to else max(0, number - 2))
        await self._flush()
        self.writer.close()

    async def _flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()


async def _pass_through(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, backend: str
) -> None:
    parts = urlsplit(backend)
    inner_reader, inner_writer = await asyncio.open_connection(parts.hostname, parts.port)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE):
                target.write(data)
                await target.drain()
        target.close()

    await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))


@asynccontextmanager
async def behind_http2(backend: str, tls: ssl.SSLContext, port: int = 0) -> AsyncIterator[str]:
    """The https URL in front of `backend` (http). `tls`: with the certificate loaded."""
    tls.set_alpn_protocols(["h2", "http/1.1"])
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        backend, timeout=unlimited, auto_decompress=False, headers={BEHIND_HTTP2: "1"}
    ) as session:
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            try:
                if writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2":
                    await _Connection(reader, writer, session).serve()
                else:
                    await _pass_through(reader, writer, backend)
            except asyncio.CancelledError:
                return  # the end of the event loop; asyncio would report it as a failure
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=tls)
        bound = server.sockets[0].getsockname()[1]
        try:
            yield f"https://127.0.0.1:{bound}"
        finally:
            server.close()
            for writer in writers:
                with contextlib.suppress(AttributeError):  # closed already, says Python 3.11.2
                    writer.transport.abort()  # TLS waits long for a client that only vanishes
            await asyncio.sleep(0)
