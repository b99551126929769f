"""An engine at the level of bytes: what it answers, connection by connection, and how it is asked."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.token_endpoint import EngineRequest
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import FinishReason

OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"transfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
Step = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Bytes of an answer, or what happens at its place."""


def event(token: int, reason: str | None = None) -> bytes:
    """One sampled token as vLLM sends it."""
    content = [{"token_id": token, "logprob": -token / 8}]
    choice = {"token_ids": [token], "logprobs": {"content": content}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


END = chunk(b"")


def plain(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Nothing more until the client hangs up."""
    await reader.read()
    writer.close()


async def pause(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What follows arrives apart from what came before."""
    await asyncio.sleep(0.02)


@dataclass
class Wire:
    """Answers the requests in order, and the last answer again and again."""

    answers: Sequence[Sequence[Step]]
    url: str = ""
    connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    left: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    """An entry for each connection that has ended."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                await self._answer(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.left.put_nowait(None)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        self.bodies.append(await reader.readexactly(length))
        self.heads.append(head)
        for step in self.answers[min(len(self.heads), len(self.answers)) - 1]:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                await asyncio.sleep(0)
            else:
                await step(reader, writer)


@asynccontextmanager
async def answering(
    *answers: Sequence[Step], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Wire]:
    wire = Wire(answers)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0, ssl=tls)
    wire.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        try:
            yield wire
        finally:
            for _ in range(wire.connections):
                await wire.left.get()


@asynccontextmanager
async def engine(url: str) -> AsyncIterator[VllmEngine]:
    async with aclosing(Connections()) as connections:
        yield VllmEngine("vllm e", url, connections)


async def sample(
    asked: VllmEngine, salvage: Salvage | None = None, prompt: Sequence[int] = (1,)
) -> FinishReason:
    ask = EngineRequest("policy", prompt, {"max_tokens": 9}, "s", "r")
    return await asked.sample(ask, salvage if salvage is not None else Salvage(), lambda: None)
