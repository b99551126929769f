"""MCP servers of the transport `sse` behind the gateway, to which agents speak streamable HTTP.
`tests/agents/test_mcp.py` uses the published SDK."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from perdure.errors import ConfigurationError
from perdure.gateway.mcp import mcp_call_record, mcp_proxy, sse_servers
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine

TOKEN = "Bearer only-the-gateway-knows-it"
END = b"the stream ends"


def event(message: dict[str, Any]) -> bytes:
    return b"event: message\r\ndata: " + json.dumps(message).encode() + b"\r\n\r\n"


def result(message: dict[str, Any], text: str = "") -> bytes:
    return event({"jsonrpc": "2.0", "id": message["id"], "result": {"content": [text]}})


def answers(message: dict[str, Any]) -> list[bytes]:
    return [result(message, message["method"])]


@dataclass
class SseServerDouble:
    """`answer` gives what a message puts on its stream."""

    answer: Callable[[dict[str, Any]], list[bytes]] = answers
    address: str = "/messages?stream={}"
    streams: "list[asyncio.Queue[bytes]]" = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Request] = field(default_factory=list)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/sse", self._stream),
                Route("/messages", self._post, methods=["POST"]),
            ]
        )

    async def _stream(self, request: Request) -> Response:
        self.seen.append(request)
        events: asyncio.Queue[bytes] = asyncio.Queue()
        events.put_nowait(
            f"event: endpoint\ndata: {self.address}\n\n".format(len(self.streams)).encode()
        )
        self.streams.append(events)
        return StreamingResponse(self._events(events), media_type="text/event-stream")

    async def _events(self, events: "asyncio.Queue[bytes]") -> AsyncIterator[bytes]:
        try:
            while (one := await events.get()) != END:
                yield one
        finally:
            self.ended.set()

    async def _post(self, request: Request) -> Response:
        self.seen.append(request)
        message = await request.json()
        if "id" in message:
            for one in self.answer(message):
                self.streams[int(request.query_params["stream"])].put_nowait(one)
        return Response("Accepted", status_code=202)


class Stand:
    """A gateway with the session `a`, whose server is the double."""

    def __init__(self, gateway: LocalGateway, http: httpx.AsyncClient) -> None:
        self.gateway, self.http, self.server = gateway, http, SseServerDouble()
        self.url = self.key = self.held = ""

    async def open(self, session_id: str = "a", **fields: Any) -> str:
        headers = {"Authorization": "${DOCS}"}
        server = {"type": "sse", "url": self.url, "headers": headers, **fields}
        return await self.gateway.open(session_id, mcp_servers={"docs": server})

    async def call(self, method: str = "tools/call", number: int = 7) -> httpx.Response:
        return await self.tell(method, id=number, params={"name": "x"})

    async def tell(self, method: str, **fields: Any) -> httpx.Response:
        """Send a message; without an id it is a notification."""
        message = {"jsonrpc": "2.0", "method": method, **fields}
        headers = {"authorization": f"Bearer {self.key}"}
        if self.held:
            headers["mcp-session-id"] = self.held
        answer = await self.http.post("/v1/mcp/docs", json=message, headers=headers)
        self.held = answer.headers.get("mcp-session-id", self.held)
        return answer

    async def failed(self, session_id: str = "a") -> str:
        return (await self.gateway.control.get(session_id)).mcp_failed


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    monkeypatch.setenv("MCP_DOCS", TOKEN)
    monkeypatch.setattr(mcp_proxy, "PATIENCE_S", 0.0)
    async with AsyncExitStack() as opened:
        engine = await opened.enter_async_context(ScriptedEngine())
        settings = {"url": engine.url, "kind": "vllm"}
        gateway = await opened.enter_async_context(LocalGateway(tmp_path, engine=settings))
        http = await opened.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=60))
        found = Stand(gateway, http)
        found.url = await opened.enter_async_context(served(found.server.app)) + "/sse"
        found.key = await found.open()
        yield found
        for one in found.server.streams:
            one.put_nowait(END)


def last_message(answer: httpx.Response) -> Any:
    return json.loads(answer.text.strip().rpartition("data: ")[2])


async def test_an_agent_keeps_one_session_at_the_server(stand: Stand) -> None:
    """Its calls share one stream, all with the credentials, and are recorded as others are."""
    for method in ("initialize", "tools/call", "tools/call"):
        answer = await stand.call(method)
    told = await stand.tell("notifications/cancelled")
    await stand.gateway.control.close("a")
    stored = await stand.gateway.store.get(mcp_call_record.calls_key(turns_key_of("a")))
    recorded = [json.loads(line) for line in stored.data.splitlines()]

    assert last_message(answer)["result"] == {"content": ["tools/call"]}
    assert (told.status_code, len(stand.server.streams)) == (202, 1)
    assert {one.headers["authorization"] for one in stand.server.seen} == {TOKEN}
    assert [(one["tool"], one["ended"]) for one in recorded] == [("x", "answered")] * 2


async def test_what_comes_before_the_answer_reaches_the_agent(stand: Stand) -> None:
    await stand.call("initialize")
    progress = event({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}})
    stand.server.answer = lambda message: [progress, b": ping\r\n\r\n", result(message)]
    answer = await stand.call()

    assert answer.content == progress + result({"id": 7})


async def test_parallel_calls_get_their_own_answers(stand: Stand) -> None:
    """The server answers both when the second one comes, in the other order."""
    await stand.call("initialize")
    asked: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> list[bytes]:
        asked.append(message)
        return [result(one, str(one["id"])) for one in reversed(asked)] if len(asked) > 1 else []

    stand.server.answer = answer
    first, second = await asyncio.gather(stand.call(number=1), stand.call(number=2))

    assert last_message(first)["result"]["content"] == ["1"]
    assert last_message(second)["result"]["content"] == ["2"]


async def test_a_stream_that_ends_in_a_call_fails_the_session(stand: Stand) -> None:
    await stand.call("initialize")
    stand.server.answer = lambda message: [END]
    answer = await stand.call()

    assert "ended a call without an answer" in answer.text
    assert "ended a call without an answer" in await stand.failed()


async def test_a_stream_that_ended_between_calls_fails_the_session(stand: Stand) -> None:
    """The server has lost what the agent did there before."""
    await stand.call("initialize")
    stand.server.streams[0].put_nowait(END)
    await stand.server.ended.wait()
    await stand.call()

    assert "docs" in (failed := await stand.failed())
    assert "lost the agent's session" in failed or "without an answer" in failed


async def test_an_answer_that_is_too_large_is_the_tools(stand: Stand) -> None:
    """The next call goes on over the same stream."""
    await stand.call("initialize")
    stand.server.answer = lambda message: [result(message, "x" * (8 << 20))]
    large = await stand.call()
    stand.server.answer = answers
    after = await stand.call(number=8)

    assert last_message(large)["error"]["message"] == "the answer exceeds 8 MiB"
    assert last_message(after)["result"] == {"content": ["tools/call"]}
    assert (len(stand.server.streams), await stand.failed()) == (1, "")


async def test_a_slow_call_on_a_living_server_is_the_tools(stand: Stand) -> None:
    stand.key = await stand.open("slow", timeout_s=4)
    await stand.call("initialize")
    stand.server.answer = lambda message: []
    answer = await stand.call()

    assert last_message(answer)["error"]["message"] == "the call took more than 4 s"
    assert await stand.failed("slow") == ""


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/messages", "http://[", "//elsewhere/m"])
async def test_credentials_go_to_no_other_server(stand: Stand, address: str) -> None:
    """A stream that names one counts as a dead server."""
    stand.server.address = address
    await stand.call("initialize")

    assert "its address for messages is not on the same server" in await stand.failed()
    assert [one.url.path for one in stand.server.seen] == ["/sse"]


async def test_a_wrong_path_is_a_dead_server(stand: Stand) -> None:
    stand.url = stand.url.replace("/sse", "/absent")
    stand.key = await stand.open("b")
    await stand.call("initialize")

    assert "has no such path (404)" in await stand.failed("b")


async def test_a_closed_session_holds_no_stream(stand: Stand) -> None:
    await stand.call("initialize")
    await stand.gateway.control.close("a")

    async with asyncio.timeout(30):
        await stand.server.ended.wait()


async def test_a_call_without_a_session_is_refused_and_fails_nothing(stand: Stand) -> None:
    answer = await stand.call()

    assert (answer.status_code, stand.server.seen) == (400, [])
    assert await stand.failed() == ""


async def test_an_id_that_is_in_use_is_refused_and_fails_nothing(stand: Stand) -> None:
    """Otherwise a policy could discard its episode with two calls of one id."""
    await stand.call("initialize")
    held: list[dict[str, Any]] = []

    def keeps(message: dict[str, Any]) -> list[bytes]:
        held.append(message)
        came.set()
        return []

    came, stand.server.answer = asyncio.Event(), keeps
    first = asyncio.create_task(stand.call())
    await came.wait()
    second = await stand.call()
    stand.server.streams[0].put_nowait(result(held[0], "late"))

    assert second.status_code == 400
    assert last_message(await first)["result"] == {"content": ["late"]}
    assert await stand.failed() == ""


async def test_an_agent_can_open_only_so_many_streams(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse_servers, "MOST_STREAMS", 2)
    statuses = []
    for _ in range(3):
        stand.held = ""
        statuses.append((await stand.call("initialize")).status_code)

    assert statuses == [200, 200, 429]
    assert (len(stand.server.streams), await stand.failed()) == (2, "")


async def test_a_gateway_of_several_processes_refuses_the_session(
    stand: Stand, tmp_path: Path
) -> None:
    """An agent's next call may reach another process, which has no stream."""
    engine = {"url": "http://127.0.0.1:1", "kind": "vllm"}
    gateway = LocalGateway(tmp_path / "pool", engine=engine, gateway={"processes": 2})
    async with gateway:
        with pytest.raises(ConfigurationError, match="PERDURE_GATEWAY__PROCESSES=1"):
            await gateway.open("b", mcp_servers={"docs": {"type": "sse", "url": stand.url}})
