"""MCP servers of the older transport `sse`: one stream of events, and an address for messages.

Agents speak streamable HTTP to the gateway. For these servers, it answers as a server of streamable
HTTP would. It holds one stream per session of an agent at a server, posts the agent's messages to
the address that the stream names, and returns the events that belong to them. A stream lives in one
gateway process. When it ends, the agent's session at the server is lost.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from perdure.gateway.mcp.event_stream import (
    LARGEST_ANSWER,
    field_of,
    json_of,
    message_of,
    taken_events,
)

SESSION = "mcp-session-id"
ADDRESS_S = 10.0
"""Seconds within which a stream must name the address for messages."""
MOST_STREAMS = 16
"""Most open streams of one gateway session. An agent that asks for another gets 429."""
INVALID = -32600
"""JSON-RPC's code of a request that is not valid."""

_END = b""


@dataclass
class _Stream:
    """An agent's session at a server."""

    owner: str
    url: str
    response: httpx.Response
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    waiting: "dict[str | int, _Answer]" = field(default_factory=dict)
    """The calls without an answer, by their ids."""

    def __post_init__(self) -> None:
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self._reading.done()

    async def address(self) -> str:
        """Where messages go. Raises: httpx.ConnectError."""
        done, _ = await asyncio.wait([self._address], timeout=ADDRESS_S)
        if not done or self._address.cancelled():
            raise httpx.ConnectError("its stream names no address for messages")
        try:
            address = urljoin(self.url, self._address.result())
            if urlsplit(address)[:2] == urlsplit(self.url)[:2]:
                return address
        except ValueError:
            pass  # it is no URL
        raise httpx.ConnectError("its address for messages is not on the same server")

    async def _read(self) -> None:
        rest = bytearray()
        try:
            async for chunk in self.response.aiter_raw():
                for event in taken_events(rest, chunk):
                    self._take(event)
                if len(rest) > LARGEST_ANSWER:  # it may be the answer of any call that waits
                    for one in self.waiting.values():
                        one.give(bytes(rest))
                    rest.clear()
        except httpx.TransportError:
            pass  # the calls that wait learn it, and the next call finds no stream
        finally:
            self._address.cancel()
            for one in self.waiting.values():
                one.end()

    def _take(self, event: bytes) -> None:
        if field_of(event, "event") == b"endpoint":
            if not self._address.done():
                self._address.set_result(field_of(event, "data").decode("utf-8", "replace"))
            return
        message = message_of(event)
        number = message.get("id")
        if "method" not in message and isinstance(number, str | int) and number in self.waiting:
            answer = self.waiting.pop(number)
            answer.give(event)
            answer.end()
        elif message and self.waiting:  # progress or a question: to the call that began first
            next(iter(self.waiting.values())).give(event)

    async def aclose(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self.response.aclose()


class _Answer(httpx.AsyncByteStream):
    """The events of one call, the last one its answer."""

    def __init__(self, stream: _Stream, number: str | int) -> None:
        self._stream, self._number = stream, number
        self._events: asyncio.Queue[bytes] = asyncio.Queue()
        self._size = 0
        stream.waiting[number] = self

    def give(self, data: bytes) -> None:
        """Add an event. Those beyond LARGEST_ANSWER are dropped, because the call has then failed."""
        if self._size <= LARGEST_ANSWER:
            self._size += len(data)
            self._events.put_nowait(data)

    def end(self) -> None:
        self._events.put_nowait(_END)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (event := await self._events.get()) != _END:
            yield event

    async def aclose(self) -> None:
        if self._stream.waiting.get(self._number) is self:
            del self._stream.waiting[self._number]


class _Body(httpx.AsyncByteStream):
    """A whole body that is read like one of the network."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


class SseServers:
    """All streams of a gateway process."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._streams: dict[str, _Stream] = {}

    async def send(self, request: httpx.Request, owner: str) -> httpx.Response:
        """Answer a request of streamable HTTP to the server at its URL. `owner`: the gateway session.

        Raises: httpx.TransportError, as a connection to the server does.
        """
        held, message = request.headers.get(SESSION, ""), json_of(request.content)
        if request.method == "DELETE":
            await self._close(held)
            return _response(200)
        if message.get("method") != "initialize":
            stream = self._streams.get(held)
            if stream is None or not stream.is_open:
                return _response(404) if held else _refused(message, "it has no session id")
            return await self._posted(stream, request, message)
        if (
            sum(one.owner == owner and one.is_open for one in self._streams.values())
            >= MOST_STREAMS
        ):
            return _response(429)
        response = await self._client.send(_get(request), stream=True)
        if not response.is_success:
            return response
        stream = _Stream(owner, str(request.url), response)
        self._streams[stream.id] = stream
        try:
            answer = await self._posted(stream, request, message)
        except BaseException:
            await self._close(stream.id)
            raise
        if not answer.is_success:
            await self._close(stream.id)
        return answer

    async def close_session(self, owner: str) -> None:
        """End the streams of a gateway session."""
        for one in [one for one in self._streams.values() if one.owner == owner]:
            await self._close(one.id)

    async def aclose(self) -> None:
        for stream_id in [*self._streams]:
            await self._close(stream_id)

    async def _close(self, stream_id: str) -> None:
        if stream := self._streams.pop(stream_id, None):
            await stream.aclose()

    async def _posted(
        self, stream: _Stream, request: httpx.Request, message: dict[str, Any]
    ) -> httpx.Response:
        """Send the message. The response has a body only if an answer will come."""
        post = _post(request, await stream.address())
        number = message.get("id") if "method" in message else None
        if number is None:
            reply = await self._client.send(post, stream=True)
            if not reply.is_success:
                return reply
            await reply.aclose()
            return _response(202)
        if number in stream.waiting:
            return _refused(message, "another call has the same id")
        answer = _Answer(stream, number)
        try:
            reply = await self._client.send(post, stream=True)
        except BaseException:
            await answer.aclose()
            raise
        if not reply.is_success:
            await answer.aclose()
            return reply
        await reply.aclose()
        if not stream.is_open:  # it may have ended before the call waited
            answer.end()
        headers = {SESSION: stream.id, "content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=answer)


def _get(request: httpx.Request) -> httpx.Request:
    return _like(request, "GET", str(request.url), {"accept": "text/event-stream"}, b"")


def _post(request: httpx.Request, address: str) -> httpx.Request:
    return _like(request, "POST", address, {}, request.content)


def _like(
    request: httpx.Request, method: str, url: str, headers: dict[str, str], content: bytes
) -> httpx.Request:
    """With the same credentials and limits."""
    left_out = ("host", "content-length", "transfer-encoding", SESSION)
    kept = {name: value for name, value in request.headers.items() if name not in left_out}
    return httpx.Request(
        method, url, headers={**kept, **headers}, content=content, extensions=request.extensions
    )


def _response(status: int) -> httpx.Response:
    return httpx.Response(status, stream=_Body(b""))


def _refused(message: dict[str, Any], why: str) -> httpx.Response:
    error = {"code": INVALID, "message": f"the request is refused: {why}"}
    body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "error": error}).encode()
    return httpx.Response(400, headers={"content-type": "application/json"}, stream=_Body(body))
