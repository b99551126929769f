"""uvicorn's httptools protocol, with a bound for request heads, fewer copies of a large body, and answers
sent in one write."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10
"""Bytes of an unfinished head, chunk extension or trailer above which the connection is refused. httptools
would buffer all of them. A complete head may be slightly longer; the application refuses it."""
AT_ONCE = 64 << 10
"""Bytes of an answer above which they are sent without waiting for the rest."""


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._no_body = 0
        """Bytes received since the last byte of a body, or since the end of a head or a request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        gathering = CoalescingTransport(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, gathering))

    def data_received(self, data: bytes) -> None:
        self._no_body += len(data)
        super().data_received(data)
        if self._no_body > MAX_HEAD and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.send_400_response(f"A head may have at most {MAX_HEAD} bytes.")
            else:
                self.transport.close()

    def on_headers_complete(self) -> None:
        self._no_body = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._no_body = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        if not cycle.body:
            cycle.body = body  # type: ignore[assignment]  # a body in one piece is never copied
        else:
            if isinstance(cycle.body, bytes):
                cycle.body = bytearray(cycle.body)
            cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._no_body = 0
        super().on_message_complete()


class CoalescingTransport:
    """A transport that joins all writes of one event loop iteration. uvloop would send the head of an
    answer as a separate packet."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)
        self._size += len(data)
        if self._size > AT_ONCE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._waiting:
            data, self._waiting, self._size = b"".join(self._waiting), [], 0
            if not self._transport.is_closing():
                self._transport.write(data)
