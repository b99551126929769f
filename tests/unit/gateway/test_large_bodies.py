"""Large bodies go around h11's buffer: what arrives is the same, however the network cuts it."""

import asyncio
import hashlib
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from perdure.gateway.http.large_bodies import LARGE
from perdure.testing.local_server import served

BODY = random.Random(0).randbytes(5 * LARGE) + b"\r\n\r\nGET / HTTP/1.1\r\n\r\n" + bytes(9 * LARGE)


class Server:
    def __init__(self) -> None:
        self.broken = asyncio.Event()
        self.begin = asyncio.Event()
        self.address = ("", 0)

    async def read(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            self.broken.set()
            raise
        return PlainTextResponse(hashlib.sha256(body).hexdigest())

    async def read_later(self, request: Request) -> Response:
        await self.begin.wait()
        return await self.read(request)

    async def refuse(self, request: Request) -> Response:
        return PlainTextResponse("refused", 403)


@asynccontextmanager
async def running() -> AsyncIterator[Server]:
    server = Server()
    routes = [
        Route("/read", server.read, methods=["POST"]),
        Route("/later", server.read_later, methods=["POST"]),
        Route("/refuse", server.refuse, methods=["POST"]),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    server.address = listener.getsockname()
    async with served(Starlette(routes=routes), listener):
        yield server


def asked(body: bytes, path: str = "/read") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes) -> bytes:
    head = b"POST /read HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


async def answers(server: Server, pieces: list[bytes], number: int) -> list[str]:
    """The texts of so many answers to what is sent, piece by piece."""
    reader, writer = await asyncio.open_connection(*server.address)
    found = []

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    sending = asyncio.create_task(send())
    async with asyncio.timeout(30):
        for _ in range(number):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            found.append((await reader.readexactly(length)).decode())
        await sending
    writer.close()
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_bodies_arrive_as_they_were_sent(seed: int) -> None:
    """Several requests on one connection, cut anywhere: also within a head, and one behind another."""
    dice = random.Random(seed)
    bodies = [BODY, b"-", BODY[: LARGE + seed], b"small", BODY[:-1], BODY[7:]]
    sent = b"".join(dice.choice((asked, chunked))(body) for body in bodies)
    cuts = sorted(dice.sample(range(len(sent)), 12))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]

    async with running() as server:
        found = await answers(server, pieces, len(bodies))

    assert found == [hashlib.sha256(body).hexdigest() for body in bodies]


async def test_pieces_that_wait_for_the_application_are_all_read() -> None:
    """Large and small ones, before the application asks for the first."""
    sent, sizes = asked(BODY, "/later"), [LARGE + 200, LARGE, 9, LARGE, 9]
    async with running() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        for size in sizes:
            writer.write(sent[:size])
            sent = sent[size:]
            await asyncio.sleep(0.02)
        server.begin.set()
        writer.write(sent)
        async with asyncio.timeout(30):
            answer = await reader.readuntil(hashlib.sha256(BODY).hexdigest().encode())
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_body_that_nobody_reads_does_not_reach_the_next_request() -> None:
    """An answer before the end of its body."""
    async with running() as server:
        found = await answers(server, [asked(BODY, "/refuse"), asked(b"next")], 2)

    assert found == ["refused", hashlib.sha256(b"next").hexdigest()]


async def test_a_body_that_breaks_off_is_no_body() -> None:
    """The application learns that the client has gone."""
    async with running() as server:
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(asked(BODY)[:-LARGE])
        await writer.drain()
        writer.close()
        async with asyncio.timeout(30):
            await server.broken.wait()
