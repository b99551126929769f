"""MCP servers behind the gateway: an agent reaches its session's servers, with the credentials, bounds
and failures that the gateway decides. `tests/agents/test_mcp.py` uses the published SDK."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from perdure.errors import ConfigurationError
from perdure.gateway.base import SessionSummary
from perdure.gateway.mcp import event_stream, mcp_call_record, mcp_proxy
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine

TOKEN = "only-the-gateway-knows-it"
HEADERS = {"Authorization": "Bearer ${DOCS}"}
Answer = Callable[[dict[str, Any]], Awaitable[Response]]


def result(message: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": fields or {"content": []}}


async def whole(message: dict[str, Any]) -> Response:
    return JSONResponse(result(message))


@dataclass
class McpServerDouble:
    """One server over streamable HTTP. `answer` answers each POST."""

    answer: Answer = whole
    seen: list[Request] = field(default_factory=list)
    probed: int = 0
    probe: Callable[[], Awaitable[None]] = field(default=lambda: asyncio.sleep(0))
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/mcp", self._called, methods=["POST", "GET", "DELETE"])],
        )

    async def _called(self, request: Request) -> Response:
        if request.method == "GET":
            self.probed += 1
            await self.probe()
            return Response(status_code=405)
        self.seen.append(request)
        if request.method == "DELETE":
            return Response(status_code=204)
        response = await self.answer(await request.json())
        response.headers.update(self.headers)
        return response


class Stand:
    """A gateway with the sessions `a` and `b`, each with a server of its own."""

    def __init__(self, gateway: LocalGateway, http: httpx.AsyncClient) -> None:
        self.gateway, self.http = gateway, http
        self.server, self.other = McpServerDouble(), McpServerDouble()
        self.url = self.other_url = ""
        self.key = self.other_key = ""

    async def open(self, session_id: str = "a", **fields: Any) -> str:
        server = {"url": self.url, "headers": HEADERS, **fields}
        return await self.gateway.open(session_id, mcp_servers={"docs": server})

    async def call(
        self, method: str = "tools/call", name: str = "docs", key: str = "", **headers: str
    ) -> httpx.Response:
        message = {
            "jsonrpc": "2.0",
            "id": 7,
            "method": method,
            "params": {"name": "search", "arguments": {"query": "x"}},
        }
        return await self.http.post(
            f"/v1/mcp/{name}",
            json=message,
            headers={"authorization": f"Bearer {key or self.key}", **headers},
        )

    async def summary(self) -> SessionSummary:
        return await self.gateway.control.get("a")

    async def calls(self) -> list[dict[str, Any]]:
        """What the closed session's file has."""
        await self.gateway.control.close("a")
        stored = await self.gateway.store.get(mcp_call_record.calls_key(turns_key_of("a")))
        return [json.loads(line) for line in stored.data.splitlines()]


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    monkeypatch.setenv("MCP_DOCS", TOKEN)
    monkeypatch.setattr(mcp_proxy, "PATIENCE_S", 0.0)
    monkeypatch.setattr(mcp_proxy, "FIRST_PAUSE_S", 0.0)
    async with AsyncExitStack() as opened:
        engine = await opened.enter_async_context(ScriptedEngine())
        settings = {"url": engine.url, "kind": "vllm"}
        gateway = await opened.enter_async_context(LocalGateway(tmp_path, engine=settings))
        http = await opened.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=60))
        found = Stand(gateway, http)
        found.url = await opened.enter_async_context(served(found.server.app)) + "/mcp"
        found.other_url = await opened.enter_async_context(served(found.other.app)) + "/mcp"
        found.key = await found.open()
        other = {"hidden": {"url": found.other_url}}
        found.other_key = await gateway.open("b", mcp_servers=other)
        yield found


# --- who reaches what --------------------------------------------------------------------------


async def test_the_gateway_adds_the_credentials_and_passes_no_others(stand: Stand) -> None:
    """A sandbox has no credential of a server, and the server gets none of the sandbox."""
    answer = await stand.call(
        **{"x-evil": "1", "cookie": "c", "mcp-protocol-version": "2025-06-18"}
    )
    got = stand.server.seen[0].headers

    assert answer.json()["result"] == {"content": []}
    assert got["authorization"] == f"Bearer {TOKEN}"
    assert got["mcp-protocol-version"] == "2025-06-18"
    assert not {"x-evil", "cookie", "x-api-key"} & set(got)


@pytest.mark.parametrize(
    ("name", "key", "status"),
    [("hidden", "", 404), ("absent", "", 404), ("docs", "a.0000", 401), ("../sessions", "", 404)],
)
async def test_a_session_reaches_only_its_own_servers(
    stand: Stand, name: str, key: str, status: int
) -> None:
    """Neither another session's server, nor one that nobody declared, nor any without a key."""
    answer = await stand.call(name=name, key=key)

    assert answer.status_code == status
    assert stand.other.seen == stand.server.seen == []


async def test_no_agent_enters_the_session_of_another_one(stand: Stand) -> None:
    """Two rollouts share a server, and one sends the other's session id at it."""
    stand.server.headers = {"mcp-session-id": "s1"}
    key = await stand.open("c")
    given = (await stand.call("initialize")).headers["mcp-session-id"]
    await stand.call(**{"mcp-session-id": given})
    stolen = await stand.call(key=key, **{"mcp-session-id": given})
    guessed = await stand.call(key=key, **{"mcp-session-id": "s1"})

    assert [one.headers.get("mcp-session-id") for one in stand.server.seen] == [None, "s1"]
    assert (stolen.status_code, guessed.status_code) == (404, 404)


async def test_a_closed_session_reaches_nothing(stand: Stand) -> None:
    await stand.gateway.control.close("a")

    assert (await stand.call()).status_code == 403
    assert stand.server.seen == []


async def test_a_gateway_without_the_variable_refuses_the_session(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MCP_DOCS")

    with pytest.raises(ConfigurationError, match="'docs' needs the variable MCP_DOCS"):
        await stand.open("d")


async def test_waiting_streams_are_refused(stand: Stand) -> None:
    """The protocol lets a server lack them, in both of its forms."""
    key = {"authorization": f"Bearer {stand.key}"}

    assert (await stand.http.get("/v1/mcp/docs", headers=key)).status_code == 405
    assert (await stand.call("subscriptions/listen")).json()["error"]["code"] == -32601
    assert stand.server.seen == []


# --- the tool's own errors ---------------------------------------------------------------------


async def fails(message: dict[str, Any]) -> Response:
    return JSONResponse(result(message, isError=True, content=[{"type": "text", "text": "no"}]))


async def crashes(message: dict[str, Any]) -> Response:
    return JSONResponse({"error": "it crashed"}, status_code=500)


async def limits(message: dict[str, Any]) -> Response:
    return Response(status_code=429)


async def knows_no_method(message: dict[str, Any]) -> Response:
    error = {"code": -32601, "message": "no such method"}
    return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": error}, status_code=404)


@pytest.mark.parametrize("answer", [fails, crashes, limits, knows_no_method])
async def test_an_error_that_the_agent_can_cause_is_the_tools(stand: Stand, answer: Answer) -> None:
    """Otherwise a policy could discard its episode with a call that fails."""
    stand.server.answer = answer
    came = await stand.call()

    assert came.status_code == (await answer({"id": 7})).status_code
    assert (await stand.summary()).mcp_failed == ""


async def test_a_slow_call_on_a_living_server_is_the_tools(stand: Stand) -> None:
    """The call ends in time, and the agent reads why."""
    key = await stand.open("slow", timeout_s=0.1)
    stand.server.answer = lambda _: asyncio.Future()
    answer = await stand.call(key=key)

    assert answer.json()["error"]["message"] == "the call took more than 0.1 s"
    assert stand.server.probed == 1
    assert (await stand.gateway.control.get("slow")).mcp_failed == ""


async def too_large(message: dict[str, Any]) -> Response:
    return JSONResponse(result(message, content=["x" * event_stream.LARGEST_ANSWER]))


async def test_an_answer_that_is_too_large_is_the_tools(stand: Stand) -> None:
    stand.server.answer = too_large
    answer = await stand.call()

    assert answer.json()["error"]["message"] == "the answer exceeds 8 MiB"
    assert (await stand.summary()).mcp_failed == ""


async def test_a_request_that_is_too_large_is_refused(stand: Stand) -> None:
    body = b" " * (mcp_proxy.LARGEST_REQUEST + 1)
    key = {"authorization": f"Bearer {stand.key}"}

    assert (await stand.http.post("/v1/mcp/docs", content=body, headers=key)).status_code == 413


# --- dead servers ------------------------------------------------------------------------------


async def moved(message: dict[str, Any]) -> Response:
    return Response(status_code=307, headers={"location": "http://elsewhere/mcp/"})


async def unauthorized(message: dict[str, Any]) -> Response:
    return Response(status_code=401)


async def gone(message: dict[str, Any]) -> Response:
    return Response(status_code=404)


async def away(message: dict[str, Any]) -> Response:
    return Response(status_code=503)


async def behind_a_dead_proxy(message: dict[str, Any]) -> Response:
    return Response(status_code=502)


async def ends_early(message: dict[str, Any]) -> Response:
    return StreamingResponse(iter([b"event: message\n\n"]), media_type="text/event-stream")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (moved, "redirects to http://elsewhere/mcp/: name that address"),
        (unauthorized, "refuses the gateway's credentials"),
        (gone, "has no such path (404)"),
        (away, "answered 503"),
        (behind_a_dead_proxy, "answered 502"),
        (ends_early, "ended a call without an answer"),
    ],
)
async def test_a_server_that_cannot_answer_fails_the_session(
    stand: Stand, answer: Answer, reason: str
) -> None:
    """The agent reads an error, and the attempt ends for a reason that names the server and no secret."""
    stand.server.answer = answer
    came = await stand.call()
    failed = (await stand.summary()).mcp_failed

    assert reason in failed
    assert failed.startswith("MCP server 'docs' at 127.0.0.1:")
    assert failed in came.text
    assert TOKEN not in failed


async def test_a_dead_server_fails_the_session(stand: Stand) -> None:
    """A second failure keeps the first reason."""
    key = await stand.open("dead", url="http://127.0.0.1:1/mcp")
    for _ in range(2):
        answer = await stand.call(key=key)
    failed = (await stand.gateway.control.get("dead")).mcp_failed

    assert "MCP server 'docs' at 127.0.0.1:1 cannot be reached" in failed
    assert answer.json()["error"]["message"] == failed


async def test_a_frozen_server_fails_the_session(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and answers nothing at all."""
    monkeypatch.setattr(mcp_proxy, "PROBE_S", 0.1)
    key = await stand.open("slow", timeout_s=0.1)
    stand.server.answer = lambda _: asyncio.Future()
    stand.server.probe = asyncio.Future
    await stand.call(key=key)

    assert "no longer answers" in (await stand.gateway.control.get("slow")).mcp_failed


async def test_a_server_that_comes_back_costs_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent sees a slow answer."""
    monkeypatch.setattr(mcp_proxy, "PATIENCE_S", 60.0)

    async def returns(message: dict[str, Any]) -> Response:
        return await (away if len(stand.server.seen) < 3 else whole)(message)

    stand.server.answer = returns
    answer = await stand.call()

    assert "result" in answer.json()
    assert (len(stand.server.seen), (await stand.summary()).mcp_failed) == (3, "")


async def test_a_lost_session_fails_and_an_ended_one_does_not(stand: Stand) -> None:
    """A restarted server has lost the agent's session. What the agent ended itself is its own doing."""
    stand.server.headers = {"mcp-session-id": "s1"}
    held = {"mcp-session-id": (await stand.call("initialize")).headers["mcp-session-id"]}
    stand.server.answer, stand.server.headers = gone, {}
    key = {"authorization": f"Bearer {stand.key}"}
    await stand.http.delete("/v1/mcp/docs", headers={**key, **held})
    ended = await stand.call(**held)
    after_end = (await stand.summary()).mcp_failed
    stand.server.headers, stand.server.answer = {"mcp-session-id": "s2"}, whole
    held = {"mcp-session-id": (await stand.call("initialize")).headers["mcp-session-id"]}
    stand.server.answer = gone
    await stand.call(**held)

    assert (ended.status_code, after_end) == (404, "")
    assert "lost the agent's session" in (await stand.summary()).mcp_failed


# --- streams and records -----------------------------------------------------------------------


async def test_events_come_as_they_are_sent(stand: Stand) -> None:
    """Progress is seen before the tool is done, whichever line ends the server uses."""
    may_end = asyncio.Event()

    async def events(message: dict[str, Any]) -> AsyncIterator[bytes]:
        yield b'event: message\r\ndata: {"method": "notifications/progress"}\r\n\r\n'
        await may_end.wait()
        yield b"data: " + json.dumps(result(message)).encode() + b"\r\n\r\n"

    async def streams(message: dict[str, Any]) -> Response:
        return StreamingResponse(events(message), media_type="text/event-stream")

    stand.server.answer = streams
    message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "wait"}}
    key = {"authorization": f"Bearer {stand.key}"}
    async with stand.http.stream("POST", "/v1/mcp/docs", json=message, headers=key) as answer:
        lines = answer.aiter_lines()
        first = [await anext(lines), await anext(lines)]
        may_end.set()
        rest = [line async for line in lines]

    assert first[1] == 'data: {"method": "notifications/progress"}'
    assert json.loads(rest[-2].removeprefix("data: ")) == result(message)
    assert [one["tool"] for one in await stand.calls()] == ["wait"]


async def test_calls_are_recorded_without_credentials(stand: Stand) -> None:
    """Arguments, answer, size and time of each call; not the client's own handshake."""
    await stand.call("initialize")
    await stand.call()
    stand.server.answer = fails
    await stand.call()
    first, second = await stand.calls()

    assert json.loads(first["params"]) == {"name": "search", "arguments": {"query": "x"}}
    assert json.loads(first["answer"]) == {"content": []}
    assert (first["server"], first["tool"], first["ended"]) == ("docs", "search", "answered")
    assert (first["is_error"], second["is_error"]) == (False, True)
    assert first["request_bytes"] > first["answer_bytes"] > 0
    assert TOKEN not in json.dumps([first, second])
    assert stand.key not in json.dumps([first, second])


async def test_records_are_bounded(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one call, and of a session whose commands call a server in a loop."""
    monkeypatch.setattr(mcp_call_record, "SHOWN", 100)
    monkeypatch.setattr("perdure.gateway.session_manager.RECORDED", 50)

    async def long(message: dict[str, Any]) -> Response:
        return JSONResponse(result(message, content=["x" * 1000]))

    stand.server.answer = long
    await stand.call()
    await stand.call()
    first, second = await stand.calls()

    assert len(first["answer"]) == 100
    assert (second["answer"], second["answer_bytes"]) == ("", first["answer_bytes"])


async def test_a_failure_outlives_the_gateway(stand: Stand, tmp_path: Path) -> None:
    """Another process of the pool reports it, because it is in the journal."""
    stand.server.answer = unauthorized
    await stand.call()
    async with LocalGateway(tmp_path, store=stand.gateway.store) as other:
        failed = (await other.control.get("a")).mcp_failed

    assert "refuses the gateway's credentials" in failed
