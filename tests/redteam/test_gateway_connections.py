"""Hostile code holds the doors to the gateway open: it takes its own share and no more."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.sandboxes.base import Exec, SandboxProvider
from perdure.sandboxes.host.keeper.gateway_forwarder import MOST
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from tests.redteam.conftest import Boot, require
from tests.stack.wait_until import until

IDLE = """
import os, socket, sys, time
held = []
for _ in range(1000):
    end = socket.socket()
    end.settimeout(1)
    try:
        end.connect(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        break
    held.append(end)
print(len(held), flush=True)
time.sleep(600)
"""

ASK = """
import socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
end.sendall(b"x" * 300000)
end.shutdown(socket.SHUT_WR)
got = 0
while data := end.recv(65536):
    got += len(data)
print(got)
"""


class Gateway:
    """Sends back what it was sent, and counts the connections it holds."""

    def __init__(self) -> None:
        self.held = 0
        self.most = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.held += 1
        self.most = max(self.most, self.held)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()
        self.held -= 1


@pytest.fixture
async def gateway(home: Path) -> AsyncIterator[Gateway]:
    served = Gateway()
    (home / "gw").mkdir()
    server = await asyncio.start_unix_server(served.serve, home / "gw" / "gateway.sock")
    yield served
    server.close()


@pytest.fixture
async def box(
    boot: Boot, provider: SandboxProvider, home: Path, gateway: Gateway
) -> NamespaceSandbox:
    """A sandbox that reaches the gateway through a forwarder."""
    if not provider.sees_host:
        pytest.skip("its sandboxes reach the gateway without a forwarder")
    made = await boot(gateway=home / "gw" / "gateway.sock")
    assert isinstance(made, NamespaceSandbox)
    return made


@pytest.fixture
def port(box: NamespaceSandbox) -> str:
    """Where the forwarder listens inside."""
    assert box.gateway_url is not None
    return box.gateway_url.rpartition(":")[2]


async def test_idle_connections_stay_within_the_sandboxs_share(
    box: NamespaceSandbox, port: str, gateway: Gateway
) -> None:
    """A thousand connections cost the host no thread, the gateway 64, and end with the command."""
    await box.start("idle", Exec(["python3", "-c", IDLE, port]))
    await until(lambda: gateway.held == MOST, "the forwarder has as many connections as it takes")

    threads = [len([*Path(f"/proc/{pid}/task").iterdir()]) for pid in _helpers(box)]
    await box.signal("idle", 9)
    await until(lambda: gateway.held == 0, "the connections ended with the command")
    asked = await box.exec(["python3", "-c", ASK, port], timeout=60)

    assert gateway.most == MOST
    assert threads
    assert set(threads) == {1}
    assert asked.stdout.strip() == b"300000"


async def test_the_forwarder_counts_against_the_sandboxs_limits(box: NamespaceSandbox) -> None:
    """What a sandbox sends through the forwarder costs the sandbox's own share of the host."""
    require(box, "memory")
    forwarder = _forwarder(box)

    def joined() -> bool:
        groups = Path(f"/proc/{forwarder}/cgroup").read_text()
        return all(Path(group).name in groups for group in box.box.meta().groups)

    await until(joined, "the forwarder is in every group of the sandbox")


async def test_a_killed_forwarder_is_replaced(box: NamespaceSandbox, port: str) -> None:
    """After kill -9 of its forwarder a sandbox reaches the gateway at the same address."""
    os.kill(_forwarder(box), signal.SIGKILL)

    async def asked() -> bool:
        return (await box.exec(["python3", "-c", ASK, port], timeout=60)).stdout == b"300000\n"

    await until(asked, "the gateway is reached again")


def _helpers(box: NamespaceSandbox) -> list[str]:
    """Pids of our own processes below the sandbox's keeper. podman and conmon have threads of theirs."""
    keeper = box.box.keeper
    assert keeper is not None
    pids = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    return [pid for pid in pids if _name(pid).startswith("perdure-")]


def _forwarder(box: NamespaceSandbox) -> int:
    (forwarder,) = (pid for pid in _helpers(box) if _name(pid) == "perdure-forward")
    return int(forwarder)


def _name(pid: str) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
