"""Routes that list, add, drain and remove engines at run time; they need the control token.

    GET    /engines                                 -> {"engines": [...], "waiting": {model: calls}}
    POST   /engines                  {"url": ..., "weight": 1.0}    -> the engine; sets a known one's weight
                                     and "kind", "model", "tokenizer", "tool_call_parser", "run"
    POST   /engines/{name}/drain     {"deadline_s": 300}            -> the engine
    DELETE /engines/{name}

Every gateway of the home applies a change within a second. An engine's own routes are never proxied.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from perdure.dialects.base import Refused
from perdure.engines.engine_roster import DRAIN_S, Roster, add_engine, drain_engine, remove_engine
from perdure.engines.engine_state import EngineSpec
from perdure.engines.pool.engine_pool import EnginePool
from perdure.gateway.rendering.message_format import checked_format
from perdure.gateway.rendering.tool_call_parsers.format_detection import AUTO
from perdure.types import DEFAULT_MODEL
from perdure.types import Request as Body

LARGEST = 1 << 16
Handler = Callable[[Request], Awaitable[Response]]


class AddEngine(Body):
    """The options of `perdure engines add`."""

    url: str
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    kind: Literal["vllm", "sglang"] = "vllm"
    model: str | None = None
    tokenizer: str | None = None
    tool_call_parser: str = AUTO
    run: str | None = None


class DrainEngine(Body):
    deadline_s: float = Field(DRAIN_S, ge=0, allow_inf_nan=False)


T = TypeVar("T", bound=Body)


def routes(control: Callable[[Handler], Handler]) -> list[Route]:
    """`control` wraps a handler to require the control token."""
    return [
        Route("/engines", control(_list), methods=["GET"]),
        Route("/engines", control(_add), methods=["POST"]),
        Route("/engines/{name}/drain", control(_drain), methods=["POST"]),
        Route("/engines/{name}", control(_remove), methods=["DELETE"]),
    ]


async def _list(request: Request) -> Response:
    pool = _pool(request)
    return JSONResponse({"engines": _shown(await pool.fleet.read(), pool), "waiting": pool.waiting})


async def _add(request: Request) -> Response:
    asked = await _read(request, AddEngine)
    pool, spec = _pool(request), EngineSpec(asked.url, asked.weight, asked.kind)
    model_format = await asyncio.to_thread(
        checked_format, asked.tokenizer, asked.tool_call_parser, "'tokenizer'"
    )
    try:
        record = await add_engine(
            pool.fleet,
            spec,
            asked.model,
            default=pool.model,
            model_format=model_format,
            run=asked.run,
        )
    except ValueError as error:
        raise Refused(400, "invalid_value", f"'url': {error}") from None
    return JSONResponse(record.model_dump(mode="json"))


async def _drain(request: Request) -> Response:
    asked = await _read(request, DrainEngine)
    record = await drain_engine(_pool(request).fleet, _name(request), asked.deadline_s)
    return JSONResponse(record.model_dump(mode="json"))


async def _remove(request: Request) -> Response:
    await remove_engine(_pool(request).fleet, _name(request))
    return Response(status_code=204)


def _shown(roster: Roster, pool: EnginePool) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    for record in roster.engines:
        if record.removed or (record.from_settings and record.name not in pool.engines):
            continue
        engine = pool.engines.get(record.name)
        here: dict[str, Any] = {"agents": pool.leases.agents(record.name)}
        if engine is not None:
            here |= {"capacity": engine.capacity.agents, "calls": len(engine.running)}
            here |= {"kv_used": engine.health.vitals.kv_used}
        if record.model == DEFAULT_MODEL:
            here["model"] = pool.model
        shown.append({**record.model_dump(mode="json"), **here})
    return shown


def _pool(request: Request) -> EnginePool:
    pool: EnginePool = request.app.state.gateway.engine.pool
    return pool


def _name(request: Request) -> str:
    return str(request.path_params["name"])


async def _read(request: Request, model: type[T]) -> T:
    """Raises: Refused, which names the field."""
    raw = await request.body()
    if len(raw) > LARGEST:
        raise Refused(413, "request_too_large", f"a request may have at most {LARGEST} bytes")
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refused(400, "invalid_value", f"'{field}': {first['msg']}") from None
