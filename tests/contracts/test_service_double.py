"""What the doubles of all sandbox services do."""

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.host.host_processes import ended, kill_process
from perdure.settings.settings_tree import Settings
from tests.doubles.fault_rules import Faults
from tests.doubles.service_double import Double, Guests

LARGE = 64 << 20
"""Bytes: more than sockets hold."""


class Downloads(Double):
    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.settings = {"clock_offset_s": None}
        self.faults = Faults(state / "faults.json")

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return [web.get("/large", self._large)]

    async def expire(self) -> None:
        pass

    async def _large(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(LARGE))


async def test_one_that_ends_leaves_no_connection_open(tmp_path: Path) -> None:
    """A slow reader is cut off when the double ends, as by a real service."""
    loop = asyncio.get_running_loop()
    with socket.socket() as reader:
        reader.setblocking(False)
        async with Downloads.serving(tmp_path / "state") as (_, url):
            host, port = url.removeprefix("http://").split(":")
            await loop.sock_connect(reader, (host, int(port)))
            await loop.sock_sendall(reader, b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await loop.sock_recv(reader, 1) == b"H"

        read = 1
        while piece := await loop.sock_recv(reader, 1 << 20):
            read += len(piece)
    assert read < LARGE


async def test_a_box_that_died_before_its_service_recorded_it_is_made_again(tmp_path: Path) -> None:
    """Otherwise it would stay until its deadline: its service was killed, and no client knows it."""
    guests = Guests(Settings(home=tmp_path))
    await guests.create(SandboxSpec("/home/user"), "box")
    first = await guests.found("box")
    assert first is not None
    keeper = first.box.keeper
    assert keeper is not None
    kill_process(keeper, signal.SIGKILL)
    await ended(keeper, 10.0)

    again = await guests.create(SandboxSpec("/home/user"), "box")

    assert (await again.exec("echo alive")).stdout == b"alive\n"
    await guests.kill("box")
