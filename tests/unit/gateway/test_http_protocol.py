"""Bodies arrive unchanged, however the network splits them, and endless heads do not fill the
memory."""

import asyncio
import hashlib
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from perdure.gateway.http.http_protocol import MAX_HEAD, CoalescingTransport, HttpProtocol
from perdure.testing.local_server import served

LARGE = 16 << 10
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
    """The bodies of that many answers to requests that are sent piece by piece."""
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
    """Several requests on one connection are split anywhere, even within a head or across two
    requests."""
    dice = random.Random(seed)
    bodies = [BODY, b"-", BODY[: LARGE + seed], b"small", BODY[:-1], BODY[7:]]
    sent = b"".join(dice.choice((asked, chunked))(body) for body in bodies)
    cuts = sorted(dice.sample(range(len(sent)), 12))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]

    async with running() as server:
        found = await answers(server, pieces, len(bodies))

    assert found == [hashlib.sha256(body).hexdigest() for body in bodies]


async def test_pieces_before_the_application_reads_are_all_kept() -> None:
    """Large and small pieces arrive before the application reads the first."""
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


async def test_an_unread_body_does_not_reach_the_next_request() -> None:
    """The application answers before the end of the body."""
    async with running() as server:
        found = await answers(server, [asked(BODY, "/refuse"), asked(b"next")], 2)

    assert found == ["refused", hashlib.sha256(b"next").hexdigest()]


async def test_a_truncated_body_is_a_disconnect() -> None:
    """The application learns that the client disconnected."""
    async with running() as server:
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(asked(BODY)[:-LARGE])
        await writer.drain()
        writer.close()
        async with asyncio.timeout(30):
            await server.broken.wait()


# --- bytes outside of bodies ---------------------------------------------------------------------


async def until_closed(server: Server, sent: bytes, more: bytes) -> tuple[bytes, int]:
    """The answer, and how many bytes of `more`, sent repeatedly, the server read before it
    closed."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(sent)
    taken = 0
    async with asyncio.timeout(30):
        try:
            while not reader.at_eof() and taken < 64 * MAX_HEAD:
                writer.write(more)
                await writer.drain()
                taken += len(more)
                await asyncio.sleep(0)
            answer = await reader.read()
        except ConnectionError:
            answer = b""
    writer.close()
    return answer, taken


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"GET /", b"a" * 4096),
        (b"GET / HTTP/1.1\r\nhost: h\r\n", b"x-a: " + b"a" * 4000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx-a: ", b"a" * 4096),
        (b"GET / HTTP/1.1\r\nhost: h\r\n", b"a" * 4096),
        (b"POST /read HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * 4096),
        (chunked(b"body")[:-2], b"x-a: " + b"a" * 4000 + b"\r\n"),
        (chunked(b"body")[:-2] + b"x-a:", b"a" * 4096),
    ],
    ids=["url", "headers", "a value", "a name", "a chunk's extension", "trailers", "a trailer"],
)
async def test_an_endless_head_is_not_kept(begun: bytes, more: bytes) -> None:
    """httptools keeps every byte of it, so a sandbox could fill the gateway's memory."""
    async with running() as server:
        answer, taken = await until_closed(server, begun, more)
        next_answer = await answers(server, [asked(b"next")], 1)

    assert taken < 64 * MAX_HEAD
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert next_answer == [hashlib.sha256(b"next").hexdigest()]


async def test_a_body_of_many_small_chunks_is_not_an_endless_head() -> None:
    """The framing of its chunks is several times as long as its bytes."""
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    sent = (
        b"POST /read HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
        + pieces
        + b"0\r\n\r\n"
    )
    async with running() as server:
        found = await answers(server, [sent, asked(b"next")], 2)

    assert len(pieces) > 16 * MAX_HEAD
    assert found == [hashlib.sha256(body).hexdigest() for body in (BODY, b"next")]


async def test_a_complete_head_does_not_count_while_the_body_is_awaited() -> None:
    """The application checks the head's length, and answers in the caller's dialect."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    config = uvicorn.Config(application)
    config.load()
    protocol = HttpProtocol(config=config, server_state=ServerState(), app_state={})
    written = Written()
    protocol.connection_made(written)
    half = b"a" * (MAX_HEAD * 3 // 4)
    protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 9\r\nx-a: " + half)
    protocol.data_received(half + b"\r\n\r\n")

    assert protocol.cycle is not None
    assert not written.closed
    for task in protocol.tasks:
        task.cancel()


class Written(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


async def test_an_answers_head_and_body_are_one_write() -> None:
    """Each packet wakes the client, and costs the gateway more than writing the answer."""
    written = Written()
    transport = CoalescingTransport(written, asyncio.get_running_loop())
    transport.write(b"head")
    transport.write(b"body")
    await asyncio.sleep(0)
    transport.write(b"the next answer")
    transport.close()
    await asyncio.sleep(0)

    assert (written.writes, written.closed) == ([b"headbody", b"the next answer"], True)


async def test_a_long_answer_is_not_buffered_until_its_end() -> None:
    """The real transport must see it to apply its limits."""
    written = Written()
    transport = CoalescingTransport(written, asyncio.get_running_loop())
    for _ in range(3):
        transport.write(bytes(MAX_HEAD))

    assert sum(map(len, written.writes)) >= 2 * MAX_HEAD
