"""The proxy of builds allows only tunnels and plain requests to known hosts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.instances.package_index_hosts import IndexHosts
from perdure.sandboxes.host import forward_proxy as proxies
from perdure.sandboxes.host.forward_proxy import HEAD_BYTES, UnreachedHosts, forward_proxy
from perdure.sandboxes.host.host_addresses import Place


@asynccontextmanager
async def index() -> AsyncIterator[tuple[Place, list[bytes]]]:
    """A server on loopback that records requests and answers hello."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.read(4096))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Place("127.0.0.1", server.sockets[0].getsockname()[1]), heads


async def said(path: Path, request: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def tunnelled(path: Path, request: bytes, sent: bytes) -> bytes:
    """What comes back through a tunnel until it ends."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@asynccontextmanager
async def proxy(
    folder: Path, *configured: Place, public: Place | None = None
) -> AsyncIterator[UnreachedHosts]:
    hosts = IndexHosts(frozenset(configured), frozenset([public] if public else []))
    async with forward_proxy(folder / "p", hosts) as asked:
        yield asked


async def test_a_tunnel_leads_to_the_configured_index(tmp_path: Path) -> None:
    """After CONNECT, bytes pass in both directions."""
    async with index() as (place, heads), proxy(tmp_path, place):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "p"))
        writer.write(f"CONNECT {place} HTTP/1.1\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"anything")
        answer = await reader.read()
        writer.close()

    assert (heads, answer.endswith(b"hello")) == ([b"anything"], True)


async def test_a_plain_request_is_passed_once_without_the_proxys_own_fields(tmp_path: Path) -> None:
    """The index gets an ordinary request; a second one for another host is dropped."""
    async with index() as (place, heads), proxy(tmp_path, place):
        asked = f"GET http://{place}/simple/?q HTTP/1.1\r\nHost: other.example\r\nX: y\r\nProxy-Connection: x\r\n\r\n"
        smuggled = "GET http://evil.example/ HTTP/1.1\r\n\r\n"
        answer = await said(tmp_path / "p", (asked + smuggled).encode())

    assert answer.endswith(b"hello")
    assert heads == [
        f"GET /simple/?q HTTP/1.1\r\nHost: {place}\r\nX: y\r\nConnection: close\r\n\r\n".encode()
    ]


async def test_an_unknown_host_is_refused_with_the_setting(tmp_path: Path) -> None:
    """The answer and the record name the requested host."""
    async with proxy(tmp_path) as asked:
        answer = await said(tmp_path / "p", b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"PERDURE_SANDBOX__BUILD_HOSTS=evil.example" in answer
    assert (asked.refused, asked.unreachable) == ({"evil.example:443"}, set())


async def test_an_added_name_that_leads_to_this_host_is_refused(tmp_path: Path) -> None:
    """A name that resolves to loopback reaches nothing, even if a setting lists it."""
    async with index() as (place, heads):
        named = Place("localhost", place.port)
        async with proxy(tmp_path, public=named) as asked:
            answer = await said(tmp_path / "p", f"CONNECT {named} HTTP/1.1\r\n\r\n".encode())

    assert (answer.split()[1], heads, asked.refused) == (b"403", [], {str(named)})


async def test_an_index_that_is_away_is_told_from_a_refusal(tmp_path: Path) -> None:
    """The build is retried later, because the registry failed and not the request."""
    async with index() as (place, _):
        pass
    async with proxy(tmp_path, place) as asked:
        answer = await said(tmp_path / "p", f"CONNECT {place} HTTP/1.1\r\n\r\n".encode())

    assert (answer.split()[1], asked.refused, asked.unreachable) == (b"502", set(), {str(place)})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"405"),
        (b"POST http://pypi.org/legacy/ HTTP/1.1\r\n\r\n", b"405"),
        (b"GET ftp://pypi.org/ HTTP/1.1\r\n\r\n", b"405"),
        (b"CONNECT pypi.org HTTP/1.1 x\r\n\r\n", b"400"),
        (b"CONNECT @:443 HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://pypi.org/ HTTP/1.1\r\nX: y\n\nGET http://evil/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://pypi.org/ HTTP/1.1\r\nHost : evil.example\r\n\r\n", b"400"),
        (b"GET http://pypi.org/ HTTP/1.1\r\nX: y\r\n Host: evil.example\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES * 2, b"431"),
    ],
)
async def test_anything_else_is_refused(tmp_path: Path, request_: bytes, status: bytes) -> None:
    """Only CONNECT, and GET and HEAD of plain HTTP, are supported."""
    async with proxy(tmp_path, Place("pypi.org", 80)):
        answer = await said(tmp_path / "p", request_)

    assert answer.split()[1] == status


async def test_a_host_behind_a_proxy_of_its_own_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tunnels go through the proxy in the host's variables, with its credentials."""
    heads: list[bytes] = []

    async def corporate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nthrough")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(corporate, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setenv("https_proxy", f"http://u:p@127.0.0.1:{port}")
    async with server, proxy(tmp_path, public=Place("pypi.org", 443)):
        answer = await said(tmp_path / "p", b"CONNECT pypi.org:443 HTTP/1.1\r\n\r\n")

    assert answer.endswith(b"\r\n\r\nthrough")
    assert heads == [
        b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org:443\r\nProxy-Authorization: Basic dTpw\r\n\r\n"
    ]


async def test_a_long_home_is_no_obstacle(tmp_path: Path) -> None:
    """The kernel's limit on socket paths does not limit the home's path."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    async with proxy(folder):
        assert (folder / "p").is_socket()
        assert (folder / "p").stat().st_mode & 0o777 == 0o600
    assert not (folder / "p").exists()


async def test_a_sandbox_carries_its_share_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections count together, in both directions."""
    monkeypatch.setattr(proxies, "MOST_BYTES", 50)
    async with index() as (place, heads), proxy(tmp_path, place):
        request = f"CONNECT {place} HTTP/1.1\r\n\r\n".encode()
        answers = [await tunnelled(tmp_path / "p", request, sent) for sent in (b"123", b"123456")]

    assert (answers[0][-5:], answers[1], heads) == (b"hello", b"", [b"123", b""])


async def test_a_handshake_in_many_pieces_is_cut(tmp_path: Path) -> None:
    """Nothing of it reaches the host: its end could name another."""
    async with index() as (place, heads), proxy(tmp_path, place) as asked:
        request = f"CONNECT {place} HTTP/1.1\r\n\r\n".encode()
        sent = b"\x16\x03\x01\x00\x01\x01" * (proxies.HELLO_BYTES // 6 + 1)
        answer = await tunnelled(tmp_path / "p", request, sent)

    assert (answer, heads) == (b"", [b""])
    assert [why for _, why in asked.counts] == ["its TLS handshake is incomplete"]


async def test_a_connection_ends_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent tunnel does not stay open."""
    monkeypatch.setattr(proxies, "LONGEST_S", 1.0)
    async with index() as (place, heads), proxy(tmp_path, place):
        async with asyncio.timeout(proxies.HEAD_S / 2):
            answer = await said(tmp_path / "p", f"CONNECT {place} HTTP/1.1\r\n\r\n".encode())

    assert (answer.split()[1], heads) == (b"200", [b""])


async def test_the_record_is_bounded(tmp_path: Path) -> None:
    """Requests for further hosts are counted together."""
    asked = UnreachedHosts()
    for number in range(proxies.MOST_NOTED + 5):
        asked.note(Place(f"h{number}.example", 443), "not listed")
    asked.note(Place("h0.example", 443), "not listed")

    assert (len(asked.counts), asked.more) == (proxies.MOST_NOTED, 5)
    assert asked.counts[Place("h0.example", 443), "not listed"] == 2


async def test_a_second_server_of_a_sandbox_keeps_its_socket(tmp_path: Path) -> None:
    """When a slow worker's proxy ends, that of the worker that took over stays."""
    first, second = proxy(tmp_path), proxy(tmp_path)
    await first.__aenter__()
    async with second:
        await first.__aexit__(None, None, None)
        answer = await said(tmp_path / "p", b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 403 ")
