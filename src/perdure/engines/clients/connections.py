"""Kept connections to engines: one POST in, and its answer's bytes handed on as they arrive.

Owns HTTP/1.1 framing, TLS, proxies and time limits; `token_server` reads the content. No task wakes for
an arrived token, so it costs a fifth of what it does through `wire`'s client, which asks everything else.
A request is sent once: whether an engine took one that broke is for the pool to judge.
"""

import asyncio
import base64
import re
import select
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast
from urllib.parse import SplitResult, quote, unquote, urlsplit

import httpx

from perdure.engines.clients.wire import CONNECT_S, READ_TIMEOUT_S

KEPT_S = 4.0
"""Seconds for which an unused connection is kept; uvicorn, on which engines run, closes it after five."""
ENDS_WITHIN_S = 0.2
"""Seconds in which an answer ends after its taker had enough, or its connection is not used again."""
MAX_HEAD = 64 << 10
MAX_SIZE_LINE = 1 << 10
MAX_TEXT = 1 << 20
"""Bytes of an answer other than 200."""
PORTS: Mapping[str, int] = {"http": 80, "https": 443}
STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: .*)?", re.S)
FIRST_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
NEXT_SIZE = re.compile(rb"\r\n" + FIRST_SIZE.pattern)
"""A chunk's size, after the end of the chunk before it."""
LENGTH = re.compile(r"[0-9]{1,15}")

Take = Callable[[bytes], bool]
"""Takes the next bytes of a 200's content; whether it had enough. What it raises ends the answer."""


class Answer(NamedTuple):
    """`content`: of an answer other than 200."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Head(NamedTuple):
    status: int
    headers: Mapping[str, str]
    persistent: bool


@dataclass(frozen=True, eq=False)
class Target:
    """Where requests go. `authority`: `host:port` as the URL has it; `line`: what is asked for."""

    scheme: str
    host: str
    port: int
    authority: str
    line: str
    headers: Mapping[str, str]
    proxy: SplitResult | None


def target(url: str) -> Target:
    """Raises: ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// URL")
    proxy = _proxy(parts.scheme, parts.hostname)
    line = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (parts.query and f"?{parts.query}")
    authority = parts.netloc.rpartition("@")[2]
    headers = {"host": authority, **_basic("authorization", parts)}
    if proxy is not None and parts.scheme == "http":
        line = f"http://{authority}{line}"
        headers |= _basic("proxy-authorization", proxy)
    port = parts.port or PORTS[parts.scheme]
    return Target(parts.scheme, parts.hostname, port, authority, line, headers, proxy)


def _proxy(scheme: str, host: str) -> SplitResult | None:
    """The proxy of the environment, as every HTTP client reads it."""
    found = urllib.request.getproxies()
    url = found.get(scheme) or found.get("all")
    if not url or urllib.request.proxy_bypass(host):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")


def _basic(name: str, parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    told = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {name: f"Basic {base64.b64encode(told.encode()).decode()}"}


class Connections:
    """Connections that wait for their next request.

    Example:
        answer = await connections.post(target(url), {"content-type": "application/json"}, body, take)
    """

    def __init__(self) -> None:
        self._idle: dict[Target, list[Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def post(self, to: Target, headers: Mapping[str, str], body: bytes, take: Take) -> Answer:
        """Raises: OSError if the connection is refused, breaks or is too slow; ValueError if the answer
        is not HTTP; and what `take` raises."""
        lengths = {"content-length": str(len(body)), "accept-encoding": "identity"}
        head = _request(f"POST {to.line}", {**headers, **lengths, **to.headers})
        connection = self._kept(to) or await self._connected(to)
        answer = await connection.ask([head, body], take)
        if connection.usable:
            self._idle.setdefault(to, []).append(connection)
            connection.keep(partial(self._forget, to, connection))
        return answer

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # in which aborted connections close their sockets

    def _forget(self, to: Target, connection: "Connection") -> None:
        self._idle[to].remove(connection)
        if not self._idle[to]:
            del self._idle[to]
        connection.abort()

    def _kept(self, to: Target) -> "Connection | None":
        waiting = self._idle.get(to, [])
        while waiting:
            connection = waiting.pop()
            if connection.taken_again():
                return connection
            connection.abort()
        return None

    async def _connected(self, to: Target) -> "Connection":
        try:
            async with asyncio.timeout(CONNECT_S):
                if to.proxy is None:
                    return await _open(to.host, to.port, self._context(to.scheme))
                if to.proxy.scheme != "http":
                    raise OSError(f"a proxy of {to.proxy.scheme}:// is not supported: use http://")
                port = to.proxy.port or PORTS["http"]
                connection = await _open(to.proxy.hostname or "", port, None)
                if (context := self._context(to.scheme)) is not None:
                    await connection.tunnel(to, to.proxy, context)
                return connection
        except TimeoutError:
            raise TimeoutError(f"no connection within {CONNECT_S:g} s") from None

    def _context(self, scheme: str) -> ssl.SSLContext | None:
        if scheme != "https":
            return None
        if self._tls is None:
            self._tls = httpx.create_ssl_context()  # SSL_CERT_FILE, or the authorities of certifi
        return self._tls


async def _open(host: str, port: int, context: ssl.SSLContext | None) -> "Connection":
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, host, port, ssl=context
    )
    return connection


def _request(line: str, headers: Mapping[str, str]) -> bytes:
    """Raises: ValueError for a header that would end its line."""
    lines = [f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if any(mark in one for one in lines for mark in "\r\n\0"):
        raise ValueError("a header contains CR, LF or NUL")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection(asyncio.Protocol):
    """One connection. `usable`: its last answer was read to the end, so it may carry the next request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Answer] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self.usable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def abort(self) -> None:
        self.usable = False
        if self._expiry is not None:
            self._expiry.cancel()
        self._transport.abort()

    def keep(self, forget: Callable[[], None]) -> None:
        self._expiry = self._loop.call_later(KEPT_S, forget)

    def taken_again(self) -> bool:
        """Whether the engine has left it open, and sent nothing that was not asked for."""
        assert self._expiry is not None
        self._expiry.cancel()
        if not self.usable or self._transport.is_closing():
            return False
        readable = select.poll()
        readable.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not readable.poll(0)

    async def tunnel(self, to: Target, proxy: SplitResult, context: ssl.SSLContext) -> None:
        """Through a proxy, which sees ciphertext. Raises: OSError, ValueError."""
        where = f"{f'[{to.host}]' if ':' in to.host else to.host}:{to.port}"
        headers = {"host": where, **_basic("proxy-authorization", proxy)}
        try:
            answer = await self.ask([_request(f"CONNECT {where}", headers)], None)
            if answer.status != httpx.codes.OK:
                raise ConnectionRefusedError(f"the proxy answered HTTP {answer.status}")
            inner = await self._loop.start_tls(
                self._transport, self, context, server_hostname=to.host
            )
        except BaseException:
            self.abort()
            raise
        assert inner is not None
        self._transport = inner

    async def ask(self, request: list[bytes], take: Take | None) -> Answer:
        """`take`: None for a tunnel, whose 200 has no content."""
        if self._transport.is_closing():
            raise ConnectionResetError("it was closed before the request")
        self.usable = False
        self._answer = self._loop.create_future()
        self._take, self._step = take, self._read_head
        self._unread, self._left, self._size = b"", 0, FIRST_SIZE
        self._enough, self._text = False, b""
        self._heard = self._loop.time()
        self._watch = self._loop.call_later(READ_TIMEOUT_S, self._look)
        self._transport.writelines(request)
        try:
            answer = await self._answer
        except BaseException:
            self.abort()
            raise
        finally:
            self._watch.cancel()
        if not self.usable:
            self.abort()
        return answer

    def _look(self) -> None:
        assert self._answer is not None
        left = self._heard + READ_TIMEOUT_S - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self._fail(TimeoutError(f"no byte for {READ_TIMEOUT_S:g} s"))

    # --- what arrives --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or answer.done():  # nobody asks, or who asked has gone
            self.abort()
            return
        self._heard = self._loop.time()
        if self._unread:
            data = self._unread + data
        at, step = 0, self._step
        try:
            while not answer.done() and (read := step(data, at)) is not None:
                at, step = read, self._step
        except Exception as error:  # for the caller, who knows what it means
            self._fail(error)
        self._unread = data[at:]
        self.usable = self.usable and not self._unread

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._answer is None:
            return
        if error is None and self._step == self._read_all:
            self._settle()
        else:
            when = "before" if self._step == self._read_head else "amid"
            self._fail(error or ConnectionResetError(f"it was closed {when} its answer"))

    def _fail(self, error: Exception) -> None:
        assert self._answer is not None
        if self._enough:
            self._settle()
        elif not self._answer.done():
            self._answer.set_exception(error)

    def _settle(self) -> None:
        assert self._answer is not None
        if not self._answer.done():
            head = self._head
            self._answer.set_result(Answer(head.status, head.headers, self._text))

    # Each step reads `data` from `at` on and returns how far it came; None: it needs more.

    def _read_head(self, data: bytes, at: int) -> int | None:
        end = data.find(b"\r\n\r\n", at, at + MAX_HEAD)
        if end < 0:
            if len(data) - at >= MAX_HEAD:
                raise ValueError(f"a head of more than {MAX_HEAD} bytes")
            return None
        head = read_head(data[at:end])
        if head.status < httpx.codes.OK:
            return end + 4  # the answer is still to come
        self._head = head
        coding, length = (head.headers.get(n) for n in ("transfer-encoding", "content-length"))
        if head.status in (httpx.codes.NO_CONTENT, httpx.codes.NOT_MODIFIED) or (
            self._take is None and head.status == httpx.codes.OK
        ):
            self._end()
        elif coding is not None:
            if coding.lower() != "chunked":
                raise ValueError(f"the transfer encoding {coding!r}")
            self._step = self._read_chunks
        elif length is None:
            self._step = self._read_all
        elif not LENGTH.fullmatch(length):
            raise ValueError(f"a content-length of {length!r}")
        else:
            self._left = int(length)
            self._step = self._read_sized
        return end + 4

    def _read_chunks(self, data: bytes, at: int) -> int | None:
        if self._left:
            return self._read_part(data, at)
        size = self._size.match(data, at)
        if size is None:
            if len(data) - at > MAX_SIZE_LINE or b"\n" in data[at + 2 :]:
                raise ValueError(f"no size of a chunk: {data[at : at + 40]!r}")
            return None
        self._size, self._left = NEXT_SIZE, int(size[1], 16)
        if not self._left:
            self._step = self._read_trailer
        return size.end()

    def _read_sized(self, data: bytes, at: int) -> int | None:
        if not self._left:
            self._end()
            return at
        return self._read_part(data, at)

    def _read_part(self, data: bytes, at: int) -> int | None:
        if at == len(data):
            return None
        part = data[at : at + self._left]
        self._left -= len(part)
        self._content(part)
        return at + len(part)

    def _read_all(self, data: bytes, at: int) -> int | None:
        self._left = len(data)
        return self._read_part(data, at)

    def _read_trailer(self, data: bytes, at: int) -> int | None:
        """Lines up to an empty one."""
        if len(data) - at > MAX_HEAD:
            raise ValueError(f"a trailer of more than {MAX_HEAD} bytes")
        end = data.find(b"\r\n", at)
        if end == at:
            self._end()
        return end + 2 if end >= 0 else None

    def _content(self, data: bytes) -> None:
        if self._enough:
            return
        if self._head.status == httpx.codes.OK and self._take is not None:
            if self._take(data):
                self._enough = True
                self._watch.cancel()
                self._watch = self._loop.call_later(ENDS_WITHIN_S, self._settle)
            return
        self._text += data
        if len(self._text) > MAX_TEXT:
            raise ValueError(f"HTTP {self._head.status} with more than {MAX_TEXT} bytes")

    def _end(self) -> None:
        self.usable = self._head.persistent
        self._settle()


def read_head(raw: bytes) -> Head:
    """Raises: ValueError."""
    line, *fields = raw.split(b"\r\n")
    status = STATUS.fullmatch(line)
    if status is None:
        raise ValueError(f"no answer of HTTP/1.1: {line[:80]!r}")
    headers: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.decode("latin-1").partition(":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise ValueError(f"a header without a name: {field[:80]!r}")
        if name == "content-length" and headers.get(name, value) != value:
            raise ValueError("two lengths")
        headers[name] = value
    leaves = "close" in headers.get("connection", "").lower()
    return Head(int(status[2]), headers, status[1] == b"1" and not leaves)
