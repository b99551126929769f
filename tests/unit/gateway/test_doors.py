"""Callers that only hold connections open do not block other callers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from perdure.gateway.http.listening_sockets import bind_unix
from perdure.gateway.rate_limits import Ceilings, Pace
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine

ANNOUNCED = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {}\r\n"
    "content-type: application/json\r\ncontent-length: 33554432\r\n\r\n{{"
)
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def test_idle_uploads_keep_no_other_session_out(tmp_path: Path) -> None:
    """One session announces four bodies of 32 MiB and sends one byte of each; another session is
    answered."""
    async with (
        ScriptedEngine({"default": {"turns": [{"content": "hi"}]}}) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        hostile, innocent = await gateway.open("hostile"), await gateway.open("innocent")
        port = int(gateway.url.rpartition(":")[2])
        async with contextlib.AsyncExitStack() as held:
            for _ in range(4):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                held.callback(writer.close)
                writer.write(ANNOUNCED.format(hostile).encode())
                await writer.drain()
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
                answer = await client.post(
                    "/v1/chat/completions",
                    json=QUESTION,
                    headers={"authorization": f"Bearer {innocent}"},
                )

    assert answer.status_code == 200


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[Path]:
    """A server that closes idle connections after a tenth of a second."""

    async def hello(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            return await send({"type": "lifespan.shutdown.complete"})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    path = tmp_path / "s"
    async with served(hello, bind_unix(path), idle_s=0.1):
        yield path


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nhost: ", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"]
)
async def test_a_connection_without_a_request_is_closed(impatient: Path, sent: bytes) -> None:
    """Connections are closed if they are silent, if their headers never end, and if they stay idle
    after an answer."""
    reader, writer = await asyncio.open_unix_connection(str(impatient))
    writer.write(sent)

    async with asyncio.timeout(60):
        answer = await reader.read()  # returns at the end of the connection
    writer.close()

    assert answer.startswith(b"HTTP/1.1 200") == sent.endswith(b"\r\n\r\n")


def test_a_session_over_its_limit_waits_until_the_allowance_refills() -> None:
    """Calls and sampled tokens both count; a debt of tokens is paid off over time."""
    now = 0.0
    pace = Pace(Ceilings(calls=60, tokens=600), clock=lambda: now)

    async def call(times: int) -> None:
        for _ in range(times):
            await pace.turn()

    asyncio.run(call(60))
    assert pace.wait_s() == pytest.approx(1.0)  # one call per second refills
    now = 30.0
    assert pace.wait_s() == 0.0
    pace.sampled(1200)
    assert pace.wait_s() == pytest.approx(60.0, abs=0.2)
    now = 91.0
    assert pace.wait_s() == 0.0


async def test_a_session_over_its_limit_is_slowed_and_others_are_not(tmp_path: Path) -> None:
    """With one call per minute, a session's second call waits; closing the session ends the
    wait."""
    async with (
        ScriptedEngine({"default": {"turns": [{"content": "hi"}]}}) as engine,
        LocalGateway(
            tmp_path,
            engine={"url": engine.url, "kind": "vllm"},
            gateway={"calls_per_minute": 1},
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):

        async def ask(key: str, content: str) -> httpx.Response:
            question = {"model": "m", "messages": [{"role": "user", "content": content}]}
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", json=question, headers=headers)

        busy, other = await gateway.open("busy"), await gateway.open("other")
        first = await ask(busy, "one")
        second = asyncio.create_task(ask(busy, "two"))
        elsewhere = await ask(other, "one")
        assert not second.done()
        await gateway.control.close("busy")
        refused = await second

    assert (first.status_code, elsewhere.status_code) == (200, 200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "session_closed")
