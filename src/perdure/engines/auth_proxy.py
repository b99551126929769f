"""The authenticating proxy in front of an engine, whose own routes require no key.

The engine listens only on loopback. Gateways hold the data key, which allows sampling and reading the
state. Only processes that update weights hold the control key, which allows every route. The proxy
forwards one request per connection.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import NamedTuple

from perdure.types import Frozen

HEAD_BYTES = 64 << 10
CHUNK_BYTES = 64 << 10
HEAD_S = 30.0
"""Seconds after which a connection without a complete request head is closed."""
HOP = (b"authorization", b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"te")
"""Headers that are not forwarded."""
LINE_ENDS = (b"\r", b"\n", b"\0")
"""Bytes that a line of the head may not contain. Some engines take them for the end of the line, and
would read a second request after them."""
DATA_KEY_ROUTES = frozenset(
    {
        *(("GET", path) for path in ("/health", "/metrics", "/v1/models", "/version")),
        *(("GET", path) for path in ("/is_paused", "/weight_info")),
        *(("GET", path) for path in ("/health_generate", "/model_info", "/server_info")),
        *(("POST", path) for path in ("/inference/v1/generate", "/generate")),
        *(("POST", path) for path in ("/tokenize", "/detokenize")),
        *(("POST", f"/v1/{path}") for path in ("completions", "chat/completions", "messages")),
    }
)
"""Routes that the data key opens. Every other route, known or not, needs the control key. Paths are
compared as they were sent."""


class EngineKeys(NamedTuple):
    """Bearer keys of a home's engines. `control` opens every route."""

    data: str
    control: str


class KeyHashes(Frozen):
    """SHA-256 of both keys. A proxy needs no more, so plans and Ray's tables hold no key."""

    data: str
    control: str

    def allows(self, key: str, method: str, path: str) -> bool:
        """Whether the key opens the route."""
        found = digest(key)
        if hmac.compare_digest(found, self.control):
            return True
        return hmac.compare_digest(found, self.data) and (method, path) in DATA_KEY_ROUTES

    def knows(self, key: str) -> bool:
        found = digest(key)
        return any(hmac.compare_digest(found, one) for one in (self.data, self.control))


def engine_keys(secret: bytes) -> EngineKeys:
    """The keys of a home. Every process with the home's secret derives the same keys."""
    derived = (hmac.new(secret, f"engine {what}".encode(), "sha256") for what in EngineKeys._fields)
    return EngineKeys(*(key.hexdigest() for key in derived))


def key_hashes(keys: EngineKeys) -> KeyHashes:
    return KeyHashes(data=digest(keys.data), control=digest(keys.control))


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Rejected(Exception):
    """The proxy's own answer to a request that it does not forward."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status

    def encoded(self) -> bytes:
        body = json.dumps({"error": {"message": str(self), "type": "engine_proxy"}}).encode()
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}"
        return f"HTTP/1.1 {self.status}\r\n{fields}\r\nconnection: close\r\n\r\n".encode() + body


class Head(NamedTuple):
    """The head of a request."""

    method: str
    path: str
    """The path without the query."""
    key: str
    length: int
    """Bytes of the body."""
    encoded: bytes
    """The head as it is sent to the engine."""


def read_head(raw: bytes) -> Head:
    """Raises: Rejected."""
    request, *lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if any(mark in line for line in (request, *lines) for mark in LINE_ENDS):
        raise Rejected("400 Bad Request", "a line of the head contains CR, LF or NUL")
    fields = [_field(line) for line in lines]
    values: Mapping[bytes, bytes] = dict(fields)
    try:
        method, target, version = request.decode("ascii").split(" ")
        length = int(values.get(b"content-length", b"0"))
    except ValueError:
        raise Rejected("400 Bad Request", "not an HTTP/1.1 request") from None
    twice = len(values) != len(fields) or b"transfer-encoding" in values
    if twice or length < 0 or not version.startswith("HTTP/1."):
        raise Rejected("400 Bad Request", "needs HTTP/1.1, no repeated header, no chunked body")
    scheme, _, key = values.get(b"authorization", b"").decode("latin-1").partition(" ")
    kept = [b"%s: %s" % field for field in fields if field[0] not in HOP]
    encoded = b"\r\n".join([request, *kept, b"connection: close", b"", b""])
    path = target.partition("?")[0]
    return Head(method, path, key.strip() if scheme.lower() == "bearer" else "", length, encoded)


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or name != name.strip() or not name:
        raise Rejected("400 Bad Request", "a header has no valid name")
    return name.lower(), value.strip()


class EngineProxy:
    """Listens on the address that gateways use, and forwards the requests that their key allows.

    Example:
        async with EngineProxy(plan.proxy_keys, "10.0.0.7", engine_port) as proxy:
            url = f"http://10.0.0.7:{proxy.port}"
    """

    def __init__(self, proxy_keys: KeyHashes, host: str, engine_port: int) -> None:
        self._keys, self._host, self._engine_port = proxy_keys, host, engine_port
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> "EngineProxy":
        self._server = await asyncio.start_server(self._serve, self._host, 0, limit=HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except Rejected as refusal:
            with contextlib.suppress(OSError):
                writer.write(refusal.encoded())
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            writer.transport.abort()  # the client gets no answer, as from a lost engine
        finally:
            await _closed(writer)
            self._open.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_S):
            head = read_head(await reader.readuntil(b"\r\n\r\n"))
        self._check(head)
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._engine_port)
        asking = asyncio.create_task(_ask(reader, ours, head))
        answering = asyncio.create_task(_copy(theirs, writer))
        try:
            # If the client disconnects, the proxy disconnects too, so that the engine aborts the request.
            await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            ours.transport.abort()  # first, because this task may be cancelled at the awaits below
            for task in (asking, answering):
                task.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)

    def _check(self, head: Head) -> None:
        if self._keys.allows(head.key, head.method, head.path):
            return
        if self._keys.knows(head.key):
            raise Rejected(
                "403 Forbidden", f"{head.path} needs the control key, which only weight updates use"
            )
        raise Rejected("401 Unauthorized", "this engine needs a key of its home")


async def _ask(reader: asyncio.StreamReader, engine: asyncio.StreamWriter, head: Head) -> None:
    """Send the request to the engine. Returns once the client has disconnected."""
    engine.write(head.encoded)
    left = head.length
    while left:
        part = await reader.read(min(left, CHUNK_BYTES))
        if not part:
            return
        left -= len(part)
        engine.write(part)
        await engine.drain()
    while await reader.read(CHUNK_BYTES):
        pass  # one request per connection: later bytes never reach the engine


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


async def _copy(engine: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await engine.read(CHUNK_BYTES):
        writer.write(part)
        await writer.drain()
