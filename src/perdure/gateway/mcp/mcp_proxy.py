"""Forwards an agent's calls to the MCP servers of its session, which a sandbox cannot reach itself.

The gateway knows the server's address and adds its credentials, so a sandbox has neither. It
forwards only the protocol's headers. If a call exceeds its limit of time or size, the agent gets an
error, as if from the tool. An unreachable server is an infrastructure failure and ends the attempt.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import structlog
from starlette.responses import Response, StreamingResponse

from perdure.dialects.base import Refused
from perdure.gateway.mcp.event_stream import LARGEST_ANSWER, json_of, message_of, taken_events
from perdure.gateway.mcp.mcp_call_record import Ended, McpCall, shown
from perdure.gateway.mcp.sse_servers import SESSION, SseServers
from perdure.gateway.session_manager import Sessions
from perdure.home_folder import Secrets
from perdure.settings import process_environment
from perdure.types import McpServer, McpServers

LARGEST_REQUEST = 4 << 20
PATIENCE_S = 60.0
"""Seconds to retry a call while the server refuses connections or answers 429 or 503."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
CONNECT_S = 5.0
KEEPALIVE_S = 1.0
"""Seconds after which an idle connection is not reused. Servers keep theirs open longer."""
LOOK_S = 1.0
"""Seconds between two checks whether the agent still waits for an answer."""
PROBE_S = 10.0
"""After a call times out, a server that answers nothing within this many seconds counts as dead."""
TOOL_ERROR, NO_METHOD = -32000, -32601
"""JSON-RPC codes of the errors that the gateway returns in the server's place."""
LISTEN = "subscriptions/listen"
"""A request whose answer never ends. Like the GET of earlier versions, a server may lack it."""

log = structlog.get_logger()


class ServerDead(Exception):
    """The server could not answer, through no fault of the agent. The message says why."""


class AnswerTooLarge(Exception):
    """The answer exceeds LARGEST_ANSWER."""


@dataclass(frozen=True)
class McpRequest:
    """One HTTP request of an agent to `/v1/mcp/{name}`."""

    session_id: str
    name: str
    method: str
    headers: Mapping[str, str]
    body: bytes
    has_hung_up: Callable[[], Awaitable[bool]]
    relayed: str = ""
    """The id that a relay gave the request; empty without a relay. A relay may send a request again."""


@dataclass
class _Call:
    """A request on its way to the server."""

    asked: McpRequest
    server: McpServer
    message: dict[str, Any]
    """The JSON-RPC message; empty for a DELETE."""
    body: bytes
    """The message as it is sent."""
    held: str
    """The id of the agent's session at the server; empty if it has none."""
    started_at: float = field(default_factory=time.time)
    size: int = 0
    """Bytes of the answer so far."""
    content: bytes | None = None
    """The whole answer, once it is read."""
    number: str = ""
    """Its id in the journal."""
    is_recorded: bool = False
    """Whether its end is in the journal, or about to be."""

    def __post_init__(self) -> None:
        self.ends_at = asyncio.get_running_loop().time() + self.server.timeout_s
        self.number = self.asked.relayed or secrets.token_hex(8)

    @property
    def id(self) -> str | int | None:
        """None if the message needs no answer."""
        return self.message.get("id") if "method" in self.message else None

    @property
    def place(self) -> str:
        """The server as messages name it: its name and host, without path and credentials."""
        return f"MCP server {self.asked.name!r} at {urlsplit(self.server.url).netloc}"


def new_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits)


def check_servers(servers: McpServers, processes: int) -> None:
    """`processes`: of this gateway. Raises: Refused (409), which names a variable that the headers need
    and the gateway lacks, or a server whose transport needs one process."""
    for name, server in servers.items():
        if server.type == "sse" and processes > 1:
            problem = (
                f"MCP server {name!r}: an `sse` connection belongs to one gateway process: serve "
                "streamable HTTP, or set PERDURE_GATEWAY__PROCESSES=1"
            )
            raise Refused(409, "conflict", problem)
        for variable in server.variables:
            if not process_environment.named(variable):
                problem = (
                    f"MCP server {name!r} needs the variable {variable}: set it in the gateway"
                )
                raise Refused(409, "conflict", problem)


class McpProxy:
    """Answers the calls of all sessions of a gateway process."""

    def __init__(self, sessions: Sessions, accepted: Secrets, client: httpx.AsyncClient) -> None:
        self._sessions = sessions
        self._secrets = accepted
        self._client = client
        self._sse = SseServers(client)
        self._watches: set[asyncio.Task[None]] = set()

    async def answer(self, asked: McpRequest) -> Response:
        """Raises: Refused; NotFound; RetryHere."""
        server = await self._sessions.mcp_server(asked.session_id, asked.name)
        message = _message(asked.body) if asked.method == "POST" else {}
        body = _written(message) if message else b""
        call = _Call(asked, server, message, body, self._held(asked))
        if message.get("method") == LISTEN:
            refusal = _error(call, NO_METHOD, "the gateway keeps no streams open")
            return Response(json.dumps(refusal), media_type="application/json")
        if asked.method == "DELETE":
            await self._sessions.note_mcp_ended(asked.session_id, call.held)
        if call.id is not None:
            is_new = await self._sessions.note_mcp_begun(asked.session_id, call.number, call.place)
            if asked.relayed and not is_new:
                return await self._refused_repeat(call)
            watch = asyncio.create_task(self._note_hang_up(call))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
        try:
            response = await self._sent(call)
            if _is_stream(response):
                headers = {**self._headers_back(call, response), "cache-control": "no-cache"}
                return StreamingResponse(self._events(call, response), headers=headers)
            content = await self._whole(call, response)
            await self._record(call, json_of(content), "answered")
            return Response(content, response.status_code, self._headers_back(call, response))
        except (ServerDead, TimeoutError, AnswerTooLarge) as error:
            answer = await self._explained(call, error)
            return Response(json.dumps(answer), media_type="application/json")

    async def close_session(self, session_id: str) -> None:
        """Close the streams of a gateway session that has ended."""
        await self._sse.close_session(session_id)

    async def aclose(self) -> None:
        await self._sse.aclose()

    async def _refused_repeat(self, call: _Call) -> Response:
        """The answer to a call that a relay sends again because its host or a gateway died. The server may
        have run the call already, so it is not sent twice: the attempt ends."""
        text = f"the answer to a call of {call.place} was lost on the way to the sandbox"
        await self._sessions.note_mcp_failed(call.asked.session_id, text)
        return Response(json.dumps(_error(call, TOOL_ERROR, text)), media_type="application/json")

    # --- the agent's session at a server ---------------------------------------------------------

    def _held(self, asked: McpRequest) -> str:
        """The server's own id of the agent's session. Its last part proves that this gateway session
        got it, so that no agent can enter the session of another one. Raises: Refused (404)."""
        given = asked.headers.get(SESSION, "")
        held, _, proof = given.rpartition(".")
        proofs = [_proof(secret, asked, held) for secret in self._secrets.accepted]
        if given and not any([hmac.compare_digest(proof, one) for one in proofs]):
            raise Refused(404, "no_mcp_session", "this session at the MCP server does not exist")
        return held

    def _headers_back(self, call: _Call, response: httpx.Response) -> dict[str, str]:
        kept = {n: v for n, v in response.headers.items() if n == "content-type" or _is_mcp(n)}
        if held := kept.get(SESSION):
            kept[SESSION] = f"{held}.{_proof(self._secrets.newest, call.asked, held)}"
        return kept

    # --- to the server ---------------------------------------------------------------------------

    async def _sent(self, call: _Call) -> httpx.Response:
        """Send the request and return the response with only its head read. A request that the
        server did not accept is sent again. Raises: ServerDead, TimeoutError."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
        until = loop.time() + (PATIENCE_S if call.message else 0)
        while True:
            response = None
            call.ends_at = loop.time() + call.server.timeout_s
            try:
                async with asyncio.timeout_at(call.ends_at):
                    response = await self._answered(call)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                reason = f"{call.place} cannot be reached: {error or type(error).__name__}"
            except httpx.TransportError as error:
                raise ServerDead(
                    f"{call.place} broke off a call: {type(error).__name__}"
                ) from error
            else:
                if response.status_code not in (429, 503):
                    return await self._usable(call, response)
                reason = f"{call.place} answered {response.status_code}"
            if loop.time() > until or await call.asked.has_hung_up():
                if response is not None and response.status_code == 429:
                    return response  # the agent's own calls may be the reason
                raise ServerDead(reason)
            if response is not None:
                await response.aclose()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _answered(self, call: _Call) -> httpx.Response:
        """Raises: httpx.TransportError."""
        if call.server.type == "sse":
            return await self._sse.send(self._request(call), call.asked.session_id)
        return await self._client.send(self._request(call), stream=True)

    def _request(self, call: _Call) -> httpx.Request:
        asked, server = call.asked, call.server
        passed = {n: v for n, v in asked.headers.items() if n in ("accept", "content-type")}
        passed |= {n: v for n, v in asked.headers.items() if _is_mcp(n) and n != SESSION}
        if call.held:
            passed[SESSION] = call.held
        return httpx.Request(
            asked.method,
            server.url,
            headers={**passed, "accept-encoding": "identity", **_own_headers(server)},
            content=call.body,
            extensions={"timeout": self._client.timeout.as_dict()},
        )

    async def _usable(self, call: _Call, response: httpx.Response) -> httpx.Response:
        """The response, unless its status says that the server or its address is wrong.

        Raises: ServerDead.
        """
        status, problem = response.status_code, ""
        if response.is_redirect:
            problem = f"redirects to {response.headers.get('location')}: name that address"
        elif response.headers.get("content-encoding", "identity") != "identity":
            problem = "compresses its answers, although a call accepts only `identity`"
        elif status == httpx.codes.UNAUTHORIZED:
            problem = "refuses the gateway's credentials"
        elif status in (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT):
            problem = f"answered {status}"
        elif status == httpx.codes.NOT_FOUND and call.asked.method == "POST":
            content = await self._whole(call, response)
            ended = await self._sessions.mcp_ended(call.asked.session_id)
            if not _is_answer(call, json_of(content)) and call.held not in ended:
                problem = "lost the agent's session" if call.held else "has no such path (404)"
        if problem:
            await response.aclose()
            raise ServerDead(f"{call.place} {problem}")
        return response

    async def _is_alive(self, server: McpServer) -> bool:
        """Whether it answers anything at all."""
        with contextlib.suppress(httpx.TransportError, TimeoutError):
            async with asyncio.timeout(PROBE_S):
                probe = httpx.Request("GET", server.url, headers=_own_headers(server))
                probe.extensions["timeout"] = self._client.timeout.as_dict()
                await (await self._client.send(probe, stream=True)).aclose()
                return True
        return False

    # --- back to the agent -----------------------------------------------------------------------

    async def _whole(self, call: _Call, response: httpx.Response) -> bytes:
        """Raises: ServerDead, TimeoutError, AnswerTooLarge."""
        if call.content is None:
            call.content = b"".join([chunk async for chunk in self._chunks(call, response)])
        return call.content

    async def _chunks(self, call: _Call, response: httpx.Response) -> AsyncIterator[bytes]:
        """Raises: ServerDead, TimeoutError, AnswerTooLarge."""
        chunks = response.aiter_raw()
        try:
            while True:
                async with asyncio.timeout_at(call.ends_at):
                    chunk = await anext(chunks, b"")
                if not chunk:
                    return
                call.size += len(chunk)
                if call.size > LARGEST_ANSWER:
                    raise AnswerTooLarge
                yield chunk
        except httpx.TransportError as error:
            raise ServerDead(f"{call.place} broke off an answer: {type(error).__name__}") from error
        finally:
            await response.aclose()

    async def _events(self, call: _Call, response: httpx.Response) -> AsyncIterator[bytes]:
        """The events as they come. The answer among them is recorded before the agent gets it."""
        rest = bytearray()
        try:
            async for chunk in self._chunks(call, response):
                events = taken_events(rest, chunk)
                for event in events:
                    if _is_answer(call, message := message_of(event)):
                        await self._record(call, message, "answered")
                if events:
                    yield b"".join(events)
            if call.id is not None and not call.is_recorded:
                raise ServerDead(f"{call.place} ended a call without an answer")
        except (ServerDead, TimeoutError, AnswerTooLarge) as error:
            answer = await self._explained(call, error)
            yield b"event: message\ndata: " + json.dumps(answer).encode() + b"\n\n"

    async def _explained(self, call: _Call, error: Exception) -> dict[str, Any]:
        """The JSON-RPC error that the agent gets in place of an answer. A dead server is noted in the
        session, whose attempt ends then."""
        ended: Ended = "unanswered"
        if isinstance(error, AnswerTooLarge):
            ended, text = "too large", f"the answer exceeds {LARGEST_ANSWER >> 20} MiB"
        elif isinstance(error, TimeoutError) and await self._is_alive(call.server):
            ended, text = "took too long", f"the call took more than {call.server.timeout_s:g} s"
        elif isinstance(error, TimeoutError):
            text = f"{call.place} no longer answers"
        else:
            text = str(error)
        answer = _error(call, TOOL_ERROR, text)
        await self._record(call, answer, ended)
        if ended == "unanswered" and call.message:
            log.warning("an MCP server failed", session_id=call.asked.session_id, reason=text)
            await self._sessions.note_mcp_failed(call.asked.session_id, text)
        return answer

    async def _note_hang_up(self, call: _Call) -> None:
        """If the agent hangs up before the call ends, record that. Otherwise the call would look as
        if its gateway process had died."""
        while not call.is_recorded:
            await asyncio.sleep(LOOK_S)
            if await call.asked.has_hung_up():
                await self._record(call, {}, "hung up")

    async def _record(self, call: _Call, answer: dict[str, Any], ended: Ended) -> None:
        if call.id is None or call.is_recorded:
            return
        call.is_recorded = True
        method = str(call.message.get("method"))
        params = call.message.get("params")
        named = params if isinstance(params, dict) else {}
        result = answer.get("result")
        is_tool_error = isinstance(result, dict) and result.get("isError") is True
        await self._sessions.note_mcp_call(
            call.asked.session_id,
            call.number,
            McpCall(
                server=call.asked.name,
                method=method[:100],
                tool=str(named.get("name") or named.get("uri") or "")[:200],
                params=shown(params),
                answer=shown(answer.get("error", result)),
                is_error="error" in answer or is_tool_error,
                ended=ended,
                started_at=call.started_at,
                seconds=round(time.time() - call.started_at, 6),
                request_bytes=len(call.asked.body),
                answer_bytes=call.size,
            ),
        )


def _error(call: _Call, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": call.id, "error": {"code": code, "message": text}}


def _proof(secret: bytes, asked: McpRequest, held: str) -> str:
    text = f"mcp:{asked.session_id}:{asked.name}:{held}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()[:32]


def _own_headers(server: McpServer) -> dict[str, str]:
    return server.filled({name: process_environment.named(name) for name in server.variables})


def _is_mcp(header: str) -> bool:
    return header.startswith("mcp-")


def _is_stream(response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return response.is_success and kind.startswith("text/event-stream")


def _message(body: bytes) -> dict[str, Any]:
    """One JSON-RPC message. A request without a usable id could not be recorded. Raises: Refused (400)."""
    message = json_of(body)
    method, number = message.get("method", "notifications/"), message.get("id")
    if not message or not isinstance(method, str):
        raise Refused(400, "invalid_json", "the body is not one JSON-RPC message")
    if not method.startswith("notifications/") and (
        isinstance(number, bool) or not isinstance(number, str | int)
    ):
        raise Refused(400, "invalid_request", "a request needs an `id`: a string or an integer")
    return message


def _written(message: dict[str, Any]) -> bytes:
    """The message as this process parsed it. The agent's own bytes might name a key twice, and the
    server might then run a different call from the recorded one. Raises: Refused (400)."""
    try:
        return json.dumps(message, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise Refused(
            400, "invalid_json", "the message nests too deeply, or contains NaN or Infinity"
        ) from None


def _is_answer(call: _Call, message: dict[str, Any]) -> bool:
    return call.id is not None and "method" not in message and message.get("id") == call.id
