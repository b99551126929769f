"""The gateway's HTTP app: routes, keys, size limits, and errors in the caller's dialect.

Holds no state; `session_manager` does. Checks a request's key, size and body before any costly work.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from perdure.dialects import anthropic, gemini, openai_chat, openai_responses
from perdure.dialects.base import Answer, CountingDialect, Dialect, ParsedCall, Refused
from perdure.dialects.json_fields import name_header
from perdure.engines.api_allowance import ApiAllowance
from perdure.engines.auth_proxy import engine_keys
from perdure.engines.base import Wait
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.configured_engine import ConfiguredEngine, check_engine_settings
from perdure.engines.engine_roster import StoredRoster, roster_key
from perdure.engines.pool.pool_metrics import pool_metrics
from perdure.engines.reported_model import named_engine
from perdure.errors import (
    ConfigurationError,
    NotFound,
    PerdureError,
    RetryHere,
    StoreUnavailable,
)
from perdure.gateway.base import STORE_UNAVAILABLE_CODE, SUMMARIES, SessionSpec, SessionSummary
from perdure.gateway.gateway_metrics import Metrics
from perdure.gateway.http import engine_routes, episode_routes
from perdure.gateway.http.api_keys import may_control, session_of
from perdure.gateway.mcp import mcp_proxy
from perdure.gateway.mcp.mcp_proxy import (
    LARGEST_REQUEST,
    McpProxy,
    McpRequest,
    check_servers,
)
from perdure.gateway.rate_limits import Ceilings
from perdure.gateway.rendering.message_format import load_format
from perdure.gateway.rendering.tokenizers import tokenizer_canary
from perdure.gateway.session_manager import Sessions
from perdure.gateway.session_model import ModelLoader, SessionModel
from perdure.gateway.turns.identical_calls import Caller
from perdure.home_folder import Secrets
from perdure.sandboxes.relay.host_relay import RELAYED
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.types import AGENT_HEADER

MAX_BODY = 32 << 20
"""Bytes of a request; 200k tokens of history are about 1 MB."""
MAX_CONTROL_BODY = 1 << 20
SESSION_IDS = TypeAdapter(list[str])
RETRY_AFTER_S = 5
MAX_HEADERS = 64 << 10
DIALECTS: dict[str, Dialect] = {
    "/v1/messages": anthropic,
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
}
"""By path. `gemini` recognizes its own URLs, which name a model."""
COUNT_PATHS = [f"/{version}/models/{{model:path}}:countTokens" for version in ("v1", "v1beta")]

log = structlog.get_logger()
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Patience:
    """How long a stream waits for its answer before it sends headers, and how often it pings after that.

    Headers are sent late, because an error can set the HTTP status only before them. Clients wait at
    least 300 s for the headers, and at least 300 s for each event.
    """

    headers_after_s: float = 240.0
    ping_every_s: float = 20.0


@dataclass(frozen=True)
class Gateway:
    """The dependencies of all routes."""

    settings: Settings
    secrets: Secrets
    sessions: Sessions
    engine: ConfiguredEngine
    metrics: Metrics
    patience: Patience
    store: Store
    mcp: McpProxy

    def waits(self, session_id: str) -> Wait | None:
        """What a call of the session waits for: an engine, or the journal."""
        return self.engine.waits(session_id) or self.sessions.waiting.longest(session_id)


def create_app(
    settings: Settings,
    secrets: Secrets,
    store: Store,
    patience: Patience = Patience(),
) -> "App":
    """The ASGI app; its lifespan owns the connections to engines.

    Raises: ConfigurationError, which names the wrong engine or tokenizer setting.
    """
    check_engine_settings(settings)
    model_format = load_format(settings.engine.tokenizer, settings.engine.tool_call_parser)
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with new_client() as client, mcp_proxy.new_client() as mcp_client:
            roster, keys = (
                StoredRoster(store, roster_key(secrets.oldest)),
                engine_keys(secrets.oldest),
            )
            vocabulary = model_format.tokenizer.vocabulary
            url, limits = named_engine(settings).url, settings.engine.limits
            engine = ConfiguredEngine(
                settings,
                client,
                roster,
                home_key=keys.data,
                vocabulary=vocabulary,
                canary=tokenizer_canary,
                allowance=ApiAllowance(store, secrets.oldest, url, limits),
            )
            ceilings = Ceilings(
                settings.gateway.calls_per_minute, settings.gateway.tokens_per_minute
            )
            sessions = Sessions(
                ModelLoader(SessionModel(engine.pool.model, model_format, engine.current), engine),
                store,
                metrics,
                secret=secrets.oldest,
                engine_url=url,
                open_hours=settings.engine.open_hours,
                ceilings=ceilings,
            )
            app.state.gateway = Gateway(
                *(settings, secrets, sessions, engine, metrics, patience, store),
                McpProxy(sessions, secrets, mcp_client),
            )
            following = asyncio.create_task(engine.follow())
            try:
                yield
            finally:
                following.cancel()
                await app.state.gateway.mcp.aclose()
                await engine.pool.aclose()

    return App(
        routes=[
            *(Route(path, COMPLETE, methods=["POST"]) for path in DIALECTS),
            Route("/v1/messages/count_tokens", _agent(_count_tokens), methods=["POST"]),
            *(Route(path, _agent(_count_tokens), methods=["POST"]) for path in COUNT_PATHS),
            Route("/v1/models", _agent(_models)),
            Route("/v1beta/models", _agent(_models)),
            Route("/v1/mcp/{name}", _agent(_mcp), methods=["POST", "DELETE"]),
            Route("/", _hello, methods=["HEAD"]),
            Route("/api/hello", _hello, methods=["HEAD"]),
            Route("/sessions", _control(_get_many), methods=["POST"]),
            Route("/sessions/{session_id}", _control(_open), methods=["PUT"]),
            Route("/sessions/{session_id}", _control(_get), methods=["GET"]),
            Route("/sessions/{session_id}", _control(_forget), methods=["DELETE"]),
            Route("/sessions/{session_id}/stop", _control(_stop), methods=["POST"]),
            Route("/sessions/{session_id}/close", _control(_close), methods=["POST"]),
            Route("/sessions/{session_id}/turns", _control(_write_turns), methods=["POST"]),
            *engine_routes.routes(_control),
            Route("/episodes/{key:path}", _answered(episode_routes.read_file), methods=["GET"]),
            Route("/healthz", _healthz),
            Route("/metrics", _metrics),
        ],
        exception_handlers={404: _no_route, 405: _no_route},
        lifespan=lifespan,
    )


class App(Starlette):
    """Sends model calls straight to their handler. The handler answers its own errors, so Starlette's
    middleware would only cost time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        called = scope["type"] == "http" and scope["method"] == "POST"
        if not called or not (
            scope["path"] in DIALECTS or gemini.is_completion_path(scope["path"])
        ):
            return await super().__call__(scope, receive, send)
        scope["app"] = self
        response = await COMPLETE(Request(scope, receive, send))
        await response(scope, receive, send)


# --- agents ----------------------------------------------------------------------------------


async def _complete(request: Request) -> Response:
    session_id = _session_of(request)
    call = _dialect_of(request).parse(await _body(request, MAX_BODY), request.headers)
    complete = _gateway(request).sessions.complete
    marked = replace(call.request, mark=name_header(request.headers, AGENT_HEADER))
    answering = asyncio.ensure_future(complete(session_id, marked, _caller(request)))
    if not call.stream:
        return Response(call.whole(await answering), media_type="application/json")
    answering.add_done_callback(_retrieved)
    await asyncio.wait([answering], timeout=_gateway(request).patience.headers_after_s)
    if answering.done():
        return Response(call.events(answering.result()), headers=STREAM_HEADERS)
    return StreamingResponse(_late_events(request, call, answering), headers=STREAM_HEADERS)


def _caller(request: Request) -> Caller:
    headers = request.headers
    again = headers.get("x-stainless-retry-count", "0") != "0" or RELAYED in headers
    key = headers.get("idempotency-key", "")
    return Caller(again, key, request.is_disconnected)


STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}


def _retrieved(answering: "asyncio.Future[Answer]") -> None:
    """Mark the error as seen. If the client hung up, nothing reads the error, and asyncio would log it."""
    if not answering.cancelled():
        answering.exception()


async def _late_events(
    request: Request, call: ParsedCall, answering: "asyncio.Future[Answer]"
) -> AsyncIterator[bytes]:
    dialect = _dialect_of(request)
    while not answering.done():
        yield dialect.PING
        await asyncio.wait([answering], timeout=_gateway(request).patience.ping_every_s)
    try:
        yield call.events(answering.result())
    except Exception as error:
        refused = _as_refused(error)
        _gateway(request).metrics.errors.labels(refused.code).inc()
        yield dialect.error_event(refused)


async def _count_tokens(request: Request) -> Response:
    session_id = _session_of(request)
    dialect: CountingDialect = _gemini_of(request) or anthropic
    call = dialect.parse(await _body(request, MAX_BODY), request.headers)
    count = await _gateway(request).sessions.count_tokens(session_id, call.request)
    return Response(dialect.token_count(count), media_type="application/json")


async def _models(request: Request) -> Response:
    model = await _gateway(request).sessions.model_of(_session_of(request))
    return Response(_dialect_of(request).models([model]), media_type="application/json")


async def _mcp(request: Request) -> Response:
    """POST and DELETE. The protocol lets a server refuse GET, whose idle streams cost
    connections."""
    session_id = _session_of(request)
    asked = McpRequest(
        session_id=session_id,
        name=request.path_params["name"],
        method=request.method,
        headers=request.headers,
        body=await _body(request, LARGEST_REQUEST),
        has_hung_up=request.is_disconnected,
        relayed=request.headers.get(RELAYED, "")[:64],
    )
    return await _gateway(request).mcp.answer(asked)


async def _hello(request: Request) -> Response:
    """Claude Code probes this route without a key to see whether the server answers."""
    return Response()


def _dialect_of(request: Request) -> Dialect:
    """The dialect of the path; on other paths, that of the header that Anthropic's and Google's clients
    always send."""
    if (google := _gemini_of(request)) is not None:
        return google
    for path, dialect in DIALECTS.items():
        if request.url.path.startswith(path):
            return dialect
    if "x-goog-api-key" in request.headers:
        return gemini.Gemini()
    return anthropic if "anthropic-version" in request.headers else openai_chat


def _gemini_of(request: Request) -> gemini.Gemini | None:
    query = request.scope["query_string"].decode("latin-1")
    return gemini.dialect_of_url(request.scope["path"], query)


def _session_of(request: Request) -> str:
    """The session whose key the caller holds. Raises: Refused (401)."""
    session_id = session_of(_gateway(request).secrets, request.headers)
    if session_id is None:
        raise Refused(401, "invalid_api_key", "the session key is missing or wrong")
    return session_id


def _agent(handler: Handler) -> Handler:
    """Answer errors in the form of the caller's dialect."""

    async def route(request: Request) -> Response:
        try:
            _check_headers(request)
            return await handler(request)
        except Exception as error:
            return _error_response(request, _as_refused(error))

    return route


COMPLETE = _agent(_complete)


# --- control ---------------------------------------------------------------------------------


async def _open(request: Request) -> Response:
    raw = await _body(request, MAX_CONTROL_BODY)
    try:
        spec = SessionSpec.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refused(400, "invalid_value", f"'{field}': {first['msg']}") from None
    if spec.session_id != request.path_params["session_id"]:
        raise Refused(400, "invalid_value", "'session_id' differs from the one in the path")
    check_servers(spec.mcp_servers, _gateway(request).settings.gateway.processes)
    summary = await _gateway(request).sessions.open(spec)
    return Response(summary.model_dump_json(), media_type="application/json")


async def _get(request: Request) -> Response:
    summary = await _summary(_gateway(request), request.path_params["session_id"])
    return Response(summary.model_dump_json(), media_type="application/json")


async def _get_many(request: Request) -> Response:
    try:
        session_ids = SESSION_IDS.validate_json(await _body(request, MAX_CONTROL_BODY))
    except ValidationError:
        raise Refused(400, "invalid_value", "the body is not a list of session ids") from None
    found = []
    for session_id in session_ids:
        with contextlib.suppress(NotFound):
            found.append(await _summary(_gateway(request), session_id))
    return Response(SUMMARIES.dump_json(found), media_type="application/json")


async def _summary(gateway: Gateway, session_id: str) -> SessionSummary:
    summary = await gateway.sessions.get(session_id)
    if waits := gateway.waits(session_id):
        if summary.waits is not None:  # a retry: the wait began with an earlier call
            since = min(summary.waits.since, waits.since)
            waits = waits.model_copy(update={"since": since, "until": summary.waits.until})
        summary = summary.model_copy(update={"waits": waits})
    if summary.waits is not None:
        waited = summary.waiting_seconds + max(0.0, time.time() - summary.waits.since)
        summary = summary.model_copy(update={"waiting_seconds": waited})
    return summary


async def _write_turns(request: Request) -> Response:
    summary = await _gateway(request).sessions.write_turns(request.path_params["session_id"])
    return Response(summary.model_dump_json(), media_type="application/json")


async def _stop(request: Request) -> Response:
    summary = await _gateway(request).sessions.stop(request.path_params["session_id"])
    return Response(summary.model_dump_json(), media_type="application/json")


async def _close(request: Request) -> Response:
    gateway, session_id = _gateway(request), request.path_params["session_id"]
    waits = gateway.waits(session_id)
    if waits is not None:
        await gateway.sessions.gave_up(session_id, waits)
    summary = await gateway.sessions.close(session_id)
    await gateway.mcp.close_session(session_id)
    gateway.engine.pool.left(session_id)
    return Response(summary.model_dump_json(), media_type="application/json")


async def _forget(request: Request) -> Response:
    session_id = request.path_params["session_id"]
    await _gateway(request).sessions.forget(session_id)
    _gateway(request).engine.pool.left(session_id)
    return Response(status_code=204)


def _control(handler: Handler) -> Handler:
    """Require the control token; a session key is not accepted."""

    async def route(request: Request) -> Response:
        if not may_control(_gateway(request).secrets, request.headers):
            raise Refused(401, "invalid_control_token", "the control token is missing or wrong")
        return await handler(request)

    return _answered(route)


def _answered(handler: Handler) -> Handler:
    """Answer errors of control and episode calls, each kind with its own status."""

    async def route(request: Request) -> Response:
        try:
            return await handler(request)
        except NotFound as error:
            return _error_response(request, Refused(404, "not_found", str(error)))
        except ConfigurationError as error:
            return _error_response(request, Refused(409, "conflict", str(error)))
        except Exception as error:
            return _error_response(request, _as_refused(error))

    return route


async def _healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok", "engine": _gateway(request).engine.name})


async def _metrics(request: Request) -> Response:
    gateway = _gateway(request)
    pool = gateway.engine.pool
    content = gateway.metrics.text() + (pool_metrics(pool) if pool.engines else b"")
    return Response(content, media_type="text/plain; version=0.0.4")


# --- shared ----------------------------------------------------------------------------------


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _check_headers(request: Request) -> None:
    if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADERS:
        raise Refused(431, "headers_too_large", f"headers may have at most {MAX_HEADERS} bytes")


async def _body(request: Request, limit: int) -> bytes:
    """Raises: Refused (413) if the announced or received size exceeds the limit; (415) if it is
    compressed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "unsupported_encoding", "send the request's body uncompressed")
    too_large = Refused(413, "request_too_large", f"a request may have at most {limit} bytes")
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > limit:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _as_refused(error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case NotFound():
            return Refused(403, "session_not_open", "this session is not open")
        case StoreUnavailable():
            return Refused(503, STORE_UNAVAILABLE_CODE, str(error))
        case RetryHere():
            return Refused(503, "engine_unavailable", str(error))
        case RecursionError():
            return Refused(400, "invalid_json", "the request is nested too deeply")
        case ClientDisconnect():
            return Refused(400, "client_closed_request", "the client disconnected")
        case PerdureError():
            log.error("call failed", error=repr(error))
            return Refused(500, "internal_error", str(error))
        case _:
            log.error("call failed", exc_info=error)
            return Refused(500, "internal_error", "the gateway failed; its log says why")


def _error_response(request: Request, refused: Refused) -> Response:
    _gateway(request).metrics.errors.labels(refused.code).inc()
    headers = {"retry-after": str(RETRY_AFTER_S)} if refused.status in (429, 503) else {}
    dialect = _dialect_of(request)
    return Response(
        dialect.error(refused),
        status_code=dialect.status(refused),
        media_type="application/json",
        headers=headers,
    )


async def _no_route(request: Request, error: Any) -> Response:
    message = f"no route {request.method} {request.url.path}"
    return _error_response(request, Refused(error.status_code, "no_route", message))
