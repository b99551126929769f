"""Hostile code reaches nothing: no network, no host, no other sandbox, no hypervisor."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.sandboxes.base import Exec, SandboxProvider
from tests.redteam.conftest import Boot, attack

CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_connection((host, int(port)), 2).close() if family == socket.AF_INET else \\
            socket.socket(family).connect((host, int(port)))
        print("reached", address)
    except OSError as error:
        print("refused", file=sys.stderr)
"""

DATAGRAMS = """
import socket
for address in (("8.8.8.8", 53), ("169.254.169.254", 80), ("255.255.255.255", 67)):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    try:
        s.sendto(b"x", address)
        print("sent", address)
    except OSError:
        pass
"""

FAMILIES = """
import socket
AF = dict(VSOCK=40, PACKET=17, ALG=38, RXRPC=33, TIPC=30, CAN=29, BLUETOOTH=31, XDP=44)
for name, family in AF.items():
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind)
            print("opened", name)
        except OSError:
            pass
for kind in (socket.AF_INET, socket.AF_INET6):
    try:
        socket.socket(kind, socket.SOCK_RAW, 1)
        print("raw socket")
    except OSError:
        pass
"""

ABSTRACT = """
import socket, sys
try:
    socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[1])
    print("reached")
except OSError:
    pass
"""

SERVER = """
import socket
s = socket.create_server(("0.0.0.0", 17171))
print("up", flush=True)
while True:
    s.accept()
"""

SYSTEM_BUS = """
import glob, os, stat
for root in ("/run", "/var", "/tmp", "/dev"):
    for path in glob.glob(root + "/**", recursive=True):
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                print(path)
        except FileNotFoundError:
            pass  # the listing's own descriptor
"""


@contextmanager
def listening(family: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)  # type: ignore[arg-type]
        server.listen()
        yield server


async def test_internet_is_out_of_reach(boot: Boot) -> None:
    """No public address, no name, and no metadata service answers."""
    targets = (
        "1.1.1.1:443",
        "8.8.8.8:53",
        "169.254.169.254:80",
        "pypi.org:443",
        "fd00:ec2::254:80",
    )
    result = await attack(await boot(), CONNECT, *targets)

    assert (result.stdout, result.stderr.count(b"refused")) == (b"", len(targets))


async def test_datagrams_leave_nowhere(boot: Boot) -> None:
    """UDP has no way out either, broadcasts included."""
    result = await attack(await boot(), DATAGRAMS)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_loopback_of_the_host_is_another(boot: Boot) -> None:
    """What listens on the host's 127.0.0.1 or on all its addresses (an engine) is not there."""
    with listening(socket.AF_INET, ("0.0.0.0", 0)) as engine:
        port = engine.getsockname()[1]
        own = _own_address()
        result = await attack(await boot(), CONNECT, f"127.0.0.1:{port}", f"{own}:{port}")

    assert (result.stdout, result.stderr.count(b"refused")) == (b"", 2)


def _own_address() -> str:
    """That of this host's name, where the name has one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


async def test_abstract_sockets_of_the_host_are_not_there(boot: Boot) -> None:
    """Unix sockets without a file (session buses, container runtimes) are not shared."""
    name = f"redteam-{uuid4().hex}"
    with listening(socket.AF_UNIX, f"\0{name}"):
        result = await attack(await boot(), ABSTRACT, name)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_no_socket_file_of_the_host(
    boot: Boot, provider: SandboxProvider, home: Path
) -> None:
    """No bus, no runtime, no gateway has its socket's file inside, the sandbox's own gateway too."""
    with listening(socket.AF_UNIX, str(home / "gw")):
        gateway = {"gateway": home / "gw"} if provider.sees_host else {}
        result = await attack(await boot(**gateway), SYSTEM_BUS)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_other_sandboxes_are_out_of_reach(boot: Boot) -> None:
    """A server in one sandbox is nowhere in another."""
    victim = await boot()
    await victim.start("server", Exec(["python3", "-c", SERVER]))
    while await victim.output("server") != b"up\n":
        assert not (await victim.wait("server", timeout_s=0.05)).done
    result = await attack(await boot(), CONNECT, "127.0.0.1:17171")

    assert (result.stdout, result.stderr) == (b"", b"refused\n")


async def test_only_plain_socket_families_open(boot: Boot) -> None:
    """Neither the hypervisor's vsock, nor packets, nor raw or exotic protocols."""
    result = await attack(await boot(), FAMILIES)

    assert (result.status.code, result.stdout) == (0, b"")


@pytest.mark.parametrize("name", ["systemd-run", "busctl", "dbus-send", "at", "crontab"])
async def test_host_services_start_nothing(boot: Boot, name: str) -> None:
    """Services that start programs on the host cannot be reached from inside."""
    arguments = {"crontab": "-l", "at": "now"}.get(name, "--user true")
    result = await (await boot()).exec(f"{name} {arguments} </dev/null; {name} true </dev/null")

    assert not result.status.ok
