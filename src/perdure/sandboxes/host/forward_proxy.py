"""The only network access of a build, an agent or tests: an HTTP proxy on a unix socket that connects
to known hosts.

The sandbox has only loopback, on which a forwarder connects to this socket.
"""

import asyncio
import base64
import contextlib
import os
import re
import socket
import urllib.request
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol
from urllib.parse import unquote, urlsplit

from perdure.sandboxes.base import Network
from perdure.sandboxes.host.client_hello import Incomplete, NotTls, server_name
from perdure.sandboxes.host.host_addresses import Place, address_of, place_of
from perdure.types import Sidecar
from perdure.types.allowed_hosts import WEB_PORTS, is_host_name
from perdure.types.containers import LOOPBACK, host_names

PROXY_PORT = 18002
"""Where a sandbox's commands reach the proxy, on its own loopback."""
HEAD_BYTES = 16 << 10
HEAD_S, CONNECT_S = 30.0, 20.0
CHUNK = 1 << 16
MOST_NOTED = 100
"""Refusals to record: hostile code may ask for any number of hosts."""
MOST_OPEN = 256
"""Connections at once. Those of a sandbox wait in its forwarder before."""
LONGEST_S = 3600.0
"""Seconds that one connection may stay open."""
LOOKUPS = 2
"""Names that one sandbox resolves at once."""
MOST_BYTES = 64 << 30
"""Bytes in both directions, of all connections of one sandbox."""
HELLO_BYTES, HELLO_PIECES = 16 << 10, 64
"""Most of a TLS handshake's first message, and most reads that it may take: each reads it again."""
_CONTROL = re.compile(rb"[\r\n\0]")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:")
"""Begins a valid header field. Servers differ in how they read other lines, such as `Host :`."""
_NOT_PASSED = (
    b"proxy-", b"connection:", b"keep-alive:", b"host:", b"content-length:", b"transfer-encoding:"
)  # fmt: skip
"""Header fields of a plain request that the proxy drops: the request has no body, and the proxy
sends the host that it checked."""


NOT_LISTED = "not listed"
UNREACHABLE = "unreachable"


class KnownHosts(Protocol):
    """The hosts to which a proxy connects."""

    def knows(self, place: Place) -> bool: ...

    def may_connect(self, place: Place, address: str) -> bool:
        """`address`: one to which the name of a known place resolves."""
        ...

    def how_to_allow(self, place: Place) -> str:
        """The answer to a request for another place."""
        ...


@dataclass
class UnreachedHosts:
    """What the sandbox asked for and did not reach."""

    counts: dict[tuple[Place, str], int] = field(default_factory=dict)
    """Place and reason -> requests. At most MOST_NOTED pairs."""
    more: int = 0
    """Requests for further pairs."""

    @property
    def refused(self) -> set[str]:
        return {str(place) for place, reason in self.counts if reason != UNREACHABLE}

    @property
    def unreachable(self) -> set[str]:
        return {str(place) for place, reason in self.counts if reason == UNREACHABLE}

    def note(self, place: Place, reason: str) -> None:
        if (place, reason) not in self.counts and len(self.counts) >= MOST_NOTED:
            self.more += 1
        else:
            self.counts[place, reason] = self.counts.get((place, reason), 0) + 1


def variables(url: str, *, direct: str = "") -> dict[str, str]:
    """Variables that make pip, uv, git, curl and npm use the proxy. `direct`: hosts to reach without
    it."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    chosen = {name: url for upper in names for name in (upper, upper.lower())}
    return {**chosen, "NO_PROXY": direct, "no_proxy": direct}


def proxy_variables(network: Network, sidecars: Mapping[str, Sidecar]) -> dict[str, str]:
    """Variables of a sandbox with this network, which reaches its sidecars without the proxy."""
    if network is not Network.LISTED:
        return {}
    direct = ",".join((*LOOPBACK, *host_names(sidecars)))
    return variables(f"http://127.0.0.1:{PROXY_PORT}", direct=direct)


@asynccontextmanager
async def forward_proxy(
    path: Path, hosts: KnownHosts, asked: UnreachedHosts | None = None
) -> AsyncIterator[UnreachedHosts]:
    """Serve on the unix socket `path` while the context is open. `asked`: counts to continue."""
    shared = _Shared(hosts, UnreachedHosts() if asked is None else asked)
    open_now: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        try:
            if len(open_now) <= MOST_OPEN:
                async with asyncio.timeout(LONGEST_S):
                    await _Exchange(shared, reader, writer).run()
        except TimeoutError:
            pass
        finally:
            open_now.discard(task)
            writer.close()

    listener = _bound(path)
    mine = path.stat().st_ino
    server = await asyncio.start_unix_server(serve, sock=listener, limit=HEAD_BYTES)
    try:
        yield shared.asked
    finally:
        server.close()
        shared.lookups.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):  # the sandbox's folder is gone
            if path.stat().st_ino == mine:  # another worker may serve the sandbox now
                path.unlink()
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)


class _Shared:
    """What the connections of one sandbox have in common."""

    def __init__(self, hosts: KnownHosts, asked: UnreachedHosts) -> None:
        self.hosts, self.asked = hosts, asked
        self.lookups = ThreadPoolExecutor(LOOKUPS, "lookup")
        """Its own threads, because a slow name server would block those of this process."""
        self._bytes_left = MOST_BYTES

    def carry(self, count: int) -> None:
        """Raises: ConnectionError."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise ConnectionError("the sandbox has carried its share of bytes")


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
    """One connection of the sandbox: a request, then bytes in both directions."""

    def __init__(
        self,
        shared: _Shared,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._shared, self._hosts, self._asked = shared, shared.hosts, shared.asked
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
            well_formed = all(map(_FIELD.match, fields))
            if len(words) != 3 or not well_formed or _CONTROL.search(b"".join((line, *fields))):
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
            async with asyncio.TaskGroup() as both:
                both.create_task(self._send(place, writer))
                both.create_task(self._copy(reader, self._writer))
        except* OSError:
            pass  # one end closed
        finally:
            writer.close()

    async def _send(self, place: Place, sink: asyncio.StreamWriter) -> None:
        """Pass what the sandbox sends, if its TLS handshake names the host of the tunnel: a server
        may hold other hosts too. Only a port that was allowed by number may carry no TLS."""
        first = await self._hello(place)
        self._shared.carry(len(first))
        sink.write(first)
        await self._copy(self._reader, sink)

    async def _hello(self, place: Place) -> bytes:
        """Raises: ConnectionError, noted, for a handshake that names another host or none."""
        first, reason = b"", ""
        async with asyncio.timeout(HEAD_S):
            for _ in range(HELLO_PIECES):
                first += (piece := await self._reader.read(CHUNK))
                if not piece:
                    break
                try:
                    reason = _difference(place, server_name(first))
                except Incomplete:
                    reason = "its TLS handshake is incomplete"
                    if len(first) < HELLO_BYTES:
                        continue
                except NotTls:
                    reason = "no TLS in the tunnel" if place.port in WEB_PORTS else ""
                break
        if reason:
            self._asked.note(place, reason)
            raise ConnectionError(reason)
        return first

    async def _plain(self, method: str, target: str, fields: list[bytes]) -> None:
        """Pass one request to a plain-HTTP server. The connection closes after the answer, so the
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
            await self._copy(reader, self._writer)
        finally:
            writer.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK):
            self._shared.carry(len(data))
            sink.write(data)
            await sink.drain()
        with contextlib.suppress(OSError):
            sink.write_eof()

    async def _known(self, place: Place | None, asked: str) -> Place:
        if place is None:
            await self._refuse(400, f"{asked[:200]!r} is not a host and port")
        if not (is_host_name(place.host) or address_of(place.host)):
            await self._refuse(400, f"{asked[:200]!r} is not a host and port")
        if not self._hosts.knows(place):
            self._asked.note(place, NOT_LISTED)
            await self._refuse(403, self._hosts.how_to_allow(place))
        return place

    async def _connect(
        self, place: Place, upstream: "_Upstream | None"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(CONNECT_S):
                if upstream and not address_of(place.host):  # that proxy resolves the name
                    return await asyncio.open_connection(upstream.host, upstream.port)
                addresses = await self._resolved(place)
                allowed = [one for one in addresses if self._hosts.may_connect(place, one)]
                if not allowed:
                    self._asked.note(place, f"leads to {addresses[0]}")
                    await self._refuse(
                        403, f"{place} leads to {addresses[0]}, which is not allowed"
                    )
                if upstream:
                    return await asyncio.open_connection(upstream.host, upstream.port)
                return await _first(allowed, place.port)
        except (OSError, TimeoutError) as error:
            await self._unreachable(place, str(error) or "no answer")

    async def _resolved(self, place: Place) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._shared.lookups,
            lambda: socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM),
        )
        return [str(address[0]) for *_, address in found]

    async def _unreachable(self, place: Place, reason: str) -> NoReturn:
        self._asked.note(place, UNREACHABLE)
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


def _difference(place: Place, named: str | None) -> str:
    """What is wrong with the server name of a handshake. Handshakes with an address have none."""
    address = address_of(place.host)
    if named is None:
        return "" if address is not None else "its TLS handshake names no host"
    name = named.lower().removesuffix(".")
    if name == place.host or (address is not None and address_of(name) == address):
        return ""
    shown = name if is_host_name(name) else "another host"
    return f"its TLS handshake names {shown}"


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
