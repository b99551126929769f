"""A build's only network access: an HTTP proxy on a unix socket that connects to package indexes
only.

The sandbox has only loopback, on which a forwarder connects to this socket.
"""

import asyncio
import base64
import contextlib
import os
import re
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from perdure.instances.package_index_hosts import IndexHosts, Place, how_to_allow, place_of

HEAD_BYTES = 16 << 10
HEAD_S, CONNECT_S = 30.0, 20.0
CHUNK = 1 << 16
MOST_NOTED = 100
"""Names to record of each kind: a hostile build may ask for any number."""
_CONTROL = re.compile(rb"[\r\n\0]")
_NOT_PASSED = (
    b"proxy-", b"connection:", b"keep-alive:", b"host:", b"content-length:", b"transfer-encoding:"
)  # fmt: skip
"""Header fields of a plain request that the proxy drops: the request has no body, and the proxy
sends the host that it checked."""


@dataclass
class UnreachedHosts:
    """The hosts that the build asked for and did not reach."""

    refused: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)

    def note(self, place: Place, names: set[str]) -> None:
        if len(names) < MOST_NOTED:
            names.add(str(place))


def variables(url: str) -> dict[str, str]:
    """Variables that make pip, uv, git, curl and npm use the proxy."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    chosen = {name: url for upper in names for name in (upper, upper.lower())}
    return {**chosen, "NO_PROXY": "", "no_proxy": ""}


@asynccontextmanager
async def index_proxy(path: Path, hosts: IndexHosts) -> AsyncIterator[UnreachedHosts]:
    """Serve on the unix socket `path` while the context is open."""
    asked = UnreachedHosts()
    open_now: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        try:
            await _Exchange(hosts, asked, reader, writer).run()
        finally:
            open_now.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=_bound(path), limit=HEAD_BYTES)
    try:
        yield asked
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)


def _bound(path: Path) -> socket.socket:
    """Bind through the folder's descriptor: the kernel limits the length of a socket's path."""
    path.unlink(missing_ok=True)  # left behind by a killed worker
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    path.chmod(0o600)
    return listener


class _Answered(Exception):
    """The proxy has answered the request with an error."""


class _Exchange:
    """One connection of the build: a request, then bytes in both directions."""

    def __init__(
        self,
        hosts: IndexHosts,
        asked: UnreachedHosts,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._hosts, self._asked = hosts, asked
        self._reader, self._writer = reader, writer

    async def run(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, _Answered):
            try:
                async with asyncio.timeout(HEAD_S):
                    head = await self._reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                await self._refuse(431, "the request's head is too long")
            line, *fields = head[:-4].split(b"\r\n")
            words = line.decode("latin-1").split(" ")
            if len(words) != 3 or _CONTROL.search(b"".join((line, *fields))):
                await self._refuse(400, "this is not an HTTP request")
            if words[0] == "CONNECT":
                await self._tunnel(words[1])
            else:
                await self._plain(words[0], words[1], fields)

    async def _tunnel(self, authority: str) -> None:
        place = await self._known(place_of(authority), authority)
        upstream = _upstream("https", place)
        reader, writer = await self._connect(place, upstream)
        try:
            if upstream:
                writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n".encode())
                writer.write(upstream.authorization + b"\r\n")
                async with asyncio.timeout(CONNECT_S):
                    answer = await reader.readuntil(b"\r\n\r\n")
                if answer.split(b" ")[1:2] != [b"200"]:
                    await self._unreachable(place, "the proxy of this host refused it")
            self._writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_copy(self._reader, writer), _copy(reader, self._writer))
        finally:
            writer.close()

    async def _plain(self, method: str, target: str, fields: list[bytes]) -> None:
        """Pass one request to a plain-HTTP index. The connection closes after the answer, so the
        proxy checks every request."""
        parts = urlsplit(target)
        if method not in ("GET", "HEAD") or parts.scheme != "http":
            await self._refuse(405, "use CONNECT, or GET or HEAD with an http:// URL")
        place = await self._known(place_of(parts.netloc.rpartition("@")[2], "http"), parts.netloc)
        upstream = _upstream("http", place)
        reader, writer = await self._connect(place, upstream)
        try:
            host = place.host if place.port == 80 else str(place)
            asked = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            wanted = f"http://{host}{asked}" if upstream else asked  # never the received text
            kept = [one for one in fields if not one.lower().startswith(_NOT_PASSED)]
            head = [f"{method} {wanted} HTTP/1.1\r\nHost: {host}".encode("latin-1"), *kept]
            head.append(b"Connection: close")
            writer.write(b"\r\n".join(head) + b"\r\n")
            writer.write((upstream.authorization if upstream else b"") + b"\r\n")
            await _copy(reader, self._writer)
        finally:
            writer.close()

    async def _known(self, place: Place | None, asked: str) -> Place:
        if place is None:
            await self._refuse(400, f"{asked[:200]!r} is not a host and port")
        if not self._hosts.knows(place):
            self._asked.note(place, self._asked.refused)
            await self._refuse(403, how_to_allow([str(place)]))
        return place

    async def _connect(
        self, place: Place, upstream: "_Upstream | None"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(CONNECT_S):
                if upstream:
                    return await asyncio.open_connection(upstream.host, upstream.port)
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(place.host, place.port, type=1)
                addresses = [str(address[0]) for *_, address in found]
                allowed = [one for one in addresses if self._hosts.may_connect(place, one)]
                if not allowed:
                    self._asked.note(place, self._asked.refused)
                    await self._refuse(403, f"{place} is an address of this host")
                return await _first(allowed, place.port)
        except (OSError, TimeoutError) as error:
            await self._unreachable(place, str(error) or "no answer")

    async def _unreachable(self, place: Place, reason: str) -> NoReturn:
        self._asked.note(place, self._asked.unreachable)
        await self._refuse(502, f"{place} cannot be reached: {reason}")

    async def _refuse(self, status: int, reason: str) -> NoReturn:
        body = f"perdure: {reason}\n".encode()
        phrase = {403: "Forbidden", 502: "Bad Gateway"}.get(status, "Refused")
        self._writer.write(
            f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        with contextlib.suppress(OSError):
            await self._writer.drain()
        raise _Answered


@dataclass(frozen=True)
class _Upstream:
    """The proxy through which this host reaches the internet."""

    host: str
    port: int
    authorization: bytes
    """A header line, or empty."""


def _upstream(scheme: str, place: Place) -> _Upstream | None:
    if urllib.request.proxy_bypass(str(place)):
        return None
    proxies = urllib.request.getproxies()
    url = urlsplit(proxies.get(scheme) or proxies.get("all") or "")
    if url.scheme != "http" or not url.hostname:
        return None
    line = b""
    if url.username is not None:
        given = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
        line = b"Proxy-Authorization: Basic " + base64.b64encode(given) + b"\r\n"
    return _Upstream(url.hostname, url.port or 80, line)


async def _first(
    addresses: list[str], port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that answers. Raises: OSError of the last address."""
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(addresses[-1], port)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK):
        sink.write(data)
        await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()
