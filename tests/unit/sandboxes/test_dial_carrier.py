"""The dialling side of a relay against a relay that cuts connections where it hurts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from perdure.sandboxes.base import ExecState, ExecStatus, PortStream, Sandbox
from perdure.sandboxes.relay.carriers import DialCarrier

LINES = [b'{"port":1}\n', b'{"healthy":200}\n']
SIZE = sum(map(len, LINES))


class CutRelay:
    """Sends one frame to each connection, then hangs up. It also plays the sandbox that is dialled."""

    def __init__(self, frames: list[bytes]) -> None:
        self.port = 0
        self._frames = iter(frames)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 x\r\nX-Perdure-Size: %d\r\n\r\n" % SIZE)
        writer.write(next(self._frames, b""))
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[DialCarrier]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield DialCarrier(cast(Sandbox, self), "relay-dial-1", "/spool", token="t")

    async def get(self, path: str, *_: Any) -> bytes:
        return str(self.port).encode()

    async def dial(self, port: int) -> PortStream:
        return PortStream(*await asyncio.open_connection("127.0.0.1", port))

    async def poll(self, exec_id: str) -> ExecStatus:
        return ExecStatus(ExecState.RUNNING)


async def first_batch(*frames: bytes) -> list[Any]:
    async with CutRelay(list(frames)).listening() as carrier, asyncio.timeout(30):
        batches = carrier.batches()
        batch = await anext(batches)
        await batches.aclose()  # type: ignore[attr-defined]
    return [heard.line for heard in batch if "dialled" not in heard.line]


async def test_a_cut_before_the_first_batch_loses_no_line() -> None:
    """Lines read before the connection broke are handed on with those of the next connection."""
    first = b"%d %d 0\n%s" % (len(LINES[0]), len(LINES[0]), LINES[0])
    second = b"%d %d 0\n%s" % (SIZE, len(LINES[1]), LINES[1])

    assert await first_batch(first, second) == [{"port": 1}, {"healthy": 200}]


async def test_garbage_at_the_end_of_the_log_holds_nothing_back() -> None:
    """A line that is no JSON object still counts as read, and requests before it are handed on."""
    frames = b"%d %d 0\n%s" % (len(LINES[0]), len(LINES[0]), LINES[0]) + b"%d 0 0\n" % SIZE

    assert await first_batch(frames) == [{"port": 1}]


async def test_an_endless_line_costs_only_the_connection() -> None:
    """Hostile code on the relay's port costs one connection, and the watch continues."""
    endless = b"1" * (1 << 17)
    whole = b"%d %d 0\n%s" % (SIZE, len(LINES[1]), LINES[1])

    assert await first_batch(endless, whole) == [{"healthy": 200}]
