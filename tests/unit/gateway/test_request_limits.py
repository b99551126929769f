"""Calls above a limit wait instead of failing, and other processes can accept the connections."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from perdure.dialects.base import Refused
from perdure.gateway.http.connection_acceptor import Acceptor
from perdure.gateway.http.listening_sockets import bind_unix
from perdure.gateway.http.request_limits import CallLimiter, Limits


class Slow:
    """An app that answers when it is told to, and counts its calls."""

    def __init__(self) -> None:
        self.arriving = 0
        """Calls with an incomplete body."""
        self.running = 0
        self.most = 0
        self.go = asyncio.Event()
        self.changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._count(arriving=1)
        try:
            while (await receive()).get("more_body"):
                pass
        finally:
            await self._count(arriving=-1)
        await self._count(running=1)
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def _count(self, arriving: int = 0, running: int = 0) -> None:
        self.arriving += arriving
        self.running += running
        self.most = max(self.most, self.running)
        async with self.changed:
            self.changed.notify_all()

    async def until_running(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.running == count)

    async def until_arriving(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.arriving == count)


def _session(headers: Mapping[str, str]) -> str | None:
    """The key is the session's name; without a key there is no session."""
    return headers.get("x-api-key")


def _client(gate: CallLimiter) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(gate), base_url="http://gateway", headers={"x-api-key": "s"}
    )


def _calls(client: httpx.AsyncClient, count: int, size: int) -> "list[asyncio.Task[Any]]":
    return [
        asyncio.create_task(client.post("/v1/messages", content=b"x" * size)) for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("limits", "most"),
    [(Limits(calls=3), 3), (Limits(body_bytes=300), 3), (Limits(session_bytes=300), 3)],
    ids=["calls", "bytes of bodies", "bytes of one session"],
)
async def test_calls_over_the_limit_wait(limits: Limits, most: int) -> None:
    """Of ten calls of 100 bytes, no more run at once than fit, and all are answered."""
    app = Slow()
    async with _client(CallLimiter(app, _session, limits)) as client:
        calls = _calls(client, 10, 100)
        await app.until_running(most)
        app.go.set()
        answers = await asyncio.gather(*calls)

    assert app.most == most
    assert [answer.status_code for answer in answers] == [200] * 10


async def test_a_thousand_agents_wait_for_their_models_at_once() -> None:
    """One process admits all of them."""
    app = Slow()
    async with _client(CallLimiter(app, _session)) as client:
        calls = _calls(client, 1000, 10_000)
        await app.until_running(1000)
        app.go.set()
        answers = await asyncio.gather(*calls)

    assert {answer.status_code for answer in answers} == {200}


async def test_a_body_larger_than_the_limit_is_admitted_alone() -> None:
    """It is not blocked forever; the app refuses it if it is too large."""
    app = Slow()
    app.go.set()
    async with _client(CallLimiter(app, _session, Limits(body_bytes=10))) as client:
        answer = await client.post("/v1/messages", content=b"x" * 100)

    assert answer.status_code == 200


async def test_idle_uploads_of_one_session_block_no_other_session() -> None:
    """Bodies that never end hold only the bytes that arrived, so other sessions' calls pass at
    once."""
    app = Slow()
    app.go.set()
    gate = CallLimiter(app, _session, Limits(calls=4, body_bytes=300, session_bytes=100))
    endless = asyncio.Event()

    async def drip() -> AsyncIterator[bytes]:
        yield b"x" * 50
        await endless.wait()

    async with _client(gate) as client:
        uploads = [
            asyncio.create_task(client.post("/v1/messages", content=drip())) for _ in range(8)
        ]
        await app.until_arriving(8)
        other = await client.post("/v1/messages", content=b"y", headers={"x-api-key": "other"})
        endless.set()
        await asyncio.gather(*uploads)

    assert other.status_code == 200


async def test_a_body_that_does_not_arrive_times_out() -> None:
    """The deadline passes while the client is silent: the call is refused, and its room is
    freed."""
    app = Slow()
    gate = CallLimiter(app, _session, Limits(body_s=0.05))
    silent = asyncio.Event()

    async def drip() -> AsyncIterator[bytes]:
        yield b"x"
        await silent.wait()

    async with _client(gate) as client:
        with pytest.raises(Refused, match=r"body did not arrive within 0\.05 s"):
            await client.post("/v1/messages", content=drip())


async def test_a_call_without_a_key_takes_no_room() -> None:
    """A caller without a key is passed on to be refused, even if the process is full."""
    app = Slow()
    async with _client(CallLimiter(app, _session, Limits(calls=1))) as client:
        calls = _calls(client, 2, 1)
        await app.until_running(1)
        client.headers.pop("x-api-key")
        stranger = asyncio.create_task(client.post("/v1/messages", content=b"x"))
        await app.until_running(2)
        app.go.set()
        await asyncio.gather(*calls, stranger)

    assert stranger.result().status_code == 200


async def test_health_and_control_do_not_wait() -> None:
    """With every place taken by agents' calls, all other requests still pass."""
    app = Slow()
    async with _client(CallLimiter(app, _session, Limits(calls=1))) as client:
        calls = _calls(client, 2, 1)
        await app.until_running(1)
        health = asyncio.create_task(client.get("/healthz"))
        await app.until_running(2)
        app.go.set()
        await asyncio.gather(*calls, health)

    assert health.result().status_code == 200


async def test_a_cancelled_call_makes_room() -> None:
    """A cancelled call leaves the queue, whether it waits or runs."""
    app = Slow()
    async with _client(CallLimiter(app, _session, Limits(calls=1))) as client:
        working, waiting, last = _calls(client, 3, 1)
        await app.until_running(1)
        waiting.cancel()
        working.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
        app.go.set()

        assert (await last).status_code == 200


async def test_too_many_waiting_calls_pause_accepting() -> None:
    """The callback reports once that too many calls wait, and once that this is over."""
    app = Slow()
    told: list[bool] = []
    gate = CallLimiter(app, _session, Limits(calls=1, waiting=2))
    gate.on_crowded = told.append
    async with _client(gate) as client:
        calls = _calls(client, 4, 1)
        await app.until_running(1)
        app.go.set()
        await asyncio.gather(*calls)

    assert told == [True, False]


async def test_a_paused_acceptor_leaves_connections_to_other_processes(tmp_path: Any) -> None:
    """Connections that it does not accept wait in the queue, and another acceptor serves them."""
    first, second = asyncio.Queue[str](), asyncio.Queue[str]()
    path = str(tmp_path / "s")
    with bind_unix(tmp_path / "s") as listener, listener.dup() as shared:
        one = Acceptor([listener], lambda: _Protocol(first))
        other = Acceptor([shared], lambda: _Protocol(second))
        one.resume()
        one.pause()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(path)
            other.resume()
            taken = await second.get()
        other.stop()

    assert taken == "connection"
    assert first.empty()


class _Protocol(asyncio.Protocol):
    def __init__(self, made: "asyncio.Queue[str]") -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.put_nowait("connection")
        transport.close()
