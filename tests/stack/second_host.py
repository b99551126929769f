"""A second host beside a stack: a home, a gateway and a worker of its own, the same server and store.

It reaches the server through a line that a test can cut, and it can be lost with all its processes.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from perdure.sandboxes.host import cgroups
from perdure.stack import stack_ports
from perdure.stack.stack_plan import Plan
from tests import held_ports
from tests.s3_server import S3Server
from tests.stack.host_requirements import folders, pids
from tests.stack.running_stack import DEATH_S, TOOLS, Stack, running
from tests.stack.wait_until import nothing, until

BUCKET = "hosts"


class Line:
    """Carries the bytes of connections to one port; while it is cut, it holds them back silently."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> "Line":
        self._server = await asyncio.start_server(self._accept, stack_ports.LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for carrying in self._carrying:
            carrying.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carrying = asyncio.current_task()
        assert carrying is not None
        self._carrying.add(carrying)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._whole.wait()
                await self._carry_both(reader, writer)
        finally:
            self._carrying.discard(carrying)
            writer.transport.abort()

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(stack_ports.LOOPBACK, self._port)
        try:
            async with asyncio.TaskGroup() as carrying:
                carrying.create_task(self._carry(reader, far_writer))
                carrying.create_task(self._carry(far_reader, writer))
        finally:
            far_writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def beside(stack: Stack, home: Path) -> AsyncIterator[tuple[Stack, Line]]:
    """The second host, with its gateway and no worker yet. Nothing of it remains afterwards."""
    home.mkdir(parents=True)
    (home / "tools").symlink_to(TOOLS)
    secret = home / "run" / "secret"
    secret.parent.mkdir()
    secret.write_text((stack.home / "run" / "secret").read_text())
    temporal_port = stack.plan.addresses.temporal_port
    with held_ports.held(1) as (gateway_port,):
        async with Line(temporal_port) as line:
            addresses = replace(
                stack.plan.addresses,
                temporal_address=f"{stack_ports.LOOPBACK}:{line.port}",
                gateway_port=gateway_port,
            )
            settings = stack.settings.changed(gateway={"port": gateway_port})
            settings = settings.model_copy(update={"home": home, "store": stack.settings.store_url})
            plan = Plan(settings, stack.plan.root, addresses, engine=stack.plan.engine)
            second = Stack(home, plan, stack.engine, stack.client, beat_s=stack.beat_s)
            try:
                await second.start_gateway()
                yield second, line
            finally:
                line.mend()
                stack.engine.let_go()
                await second.stop()
                await nothing(lambda: _processes(home))


@asynccontextmanager
async def two_hosts(folder: Path, s3: S3Server) -> AsyncIterator[tuple[Stack, Stack, Line]]:
    """The first host has no worker yet, so that rollouts begin on the second, which serves."""
    store = f"s3://{BUCKET}"
    async with (
        running(folder / "a", workers=0, store=store, s3_url=s3.url, beat_s=DEATH_S) as first,
        beside(first, folder / "b") as (second, line),
    ):
        await second.start_worker()
        await until(lambda: serves(second), "the second host serves")
        yield first, second, line


def serves(host: Stack, number: int = 0) -> bool:
    """Whether its term of that number has begun."""
    path = host.home / "run" / "term"
    return path.exists() and path.read_text() == str(number) and path.stat().st_mtime > 0


async def lose(host: Stack) -> None:
    """kill -9 of every process of the host, sandboxes and their keepers too, and its folder is gone.

    So are its control groups, which would outlive it on this machine.
    """
    while found := _processes(host.home):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    boxes = folders(host.provider.root)  # also those that were being made
    names = tuple(f"perdure-{box.name}-" for box in boxes)
    groups = folders(Path("/sys/fs/cgroup"), depth=3)
    host.home.rename(host.home.with_name(f"{host.home.name}-lost"))
    left = [path for path in groups if path.name.startswith(names)]
    await until(lambda: cgroups.remove(left), "a busy host lets go of the groups")


def _processes(home: Path) -> list[int]:
    """Those whose environment or command line names the home."""
    return [pid for pid in pids() if pid != os.getpid() and _names(pid, f"{home}".encode())]


def _names(pid: int, home: bytes) -> bool:
    with contextlib.suppress(OSError):
        for name in ("environ", "cmdline"):
            if home in Path(f"/proc/{pid}/{name}").read_bytes() and _state(pid) != b"Z":
                return True
    return False


def _state(pid: int) -> bytes:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
