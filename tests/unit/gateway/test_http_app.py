"""The gateway's HTTP interface: late headers, pings, keys, limits, and errors in the caller's
dialect."""

import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from perdure.engines.clients.anthropic_hosted import to_messages
from perdure.episodes.turns_parquet import decode
from perdure.gateway.http.http_app import MAX_HEADERS, Patience, create_app
from perdure.testing import local_gateway
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import Faults, ScriptedEngine
from perdure.types import AGENT_HEADER, Purpose, Turn

DIALECTS = ["/v1/messages", "/v1/chat/completions", "/v1/responses"]
PINGS = dict(zip(DIALECTS, ["event: ping", ": ping", "event: keepalive"], strict=True))
ENDS = dict(zip(DIALECTS, ["message_stop", "[DONE]", "response.completed"], strict=True))
FAILURES = dict(zip(DIALECTS, ["error", "", "response.failed"], strict=True))

PATHS = ("chat/completions", "messages")


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine({"default": {"turns": [{"content": "Hello."}]}}) as engine:
        yield engine


@pytest.fixture
async def gateway(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
        yield gateway


@pytest.fixture
async def impatient(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalGateway]:
    """A gateway that sends headers at once, and pings until the answer is ready."""
    patience = Patience(headers_after_s=0.0, ping_every_s=0.01)
    monkeypatch.setattr(
        local_gateway, "create_app", functools.partial(create_app, patience=patience)
    )
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
        yield gateway


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


def _body(path: str, **fields: Any) -> dict[str, Any]:
    messages = "input" if path == "/v1/responses" else "messages"
    return {"model": "m", messages: [{"role": "user", "content": "Hi"}], **fields}


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_slow_answer_is_preceded_by_pings(
    impatient: LocalGateway, http: httpx.AsyncClient, path: str
) -> None:
    """A client with a read timeout sees the pings, and then the whole stream."""
    key = await impatient.open("s")

    body = _body(path, stream=True)
    answer = await http.post(impatient.url + path, json=body, headers=_bearer(key))

    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text.startswith(PINGS[path])
    assert ENDS[path] in answer.text.splitlines()[-2]


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_slow_stream_holds_the_bytes_of_a_quick_one(
    impatient: LocalGateway, http: httpx.AsyncClient, path: str
) -> None:
    """Pings precede the answer; no part of the answer is sent before it is durable."""
    key = await impatient.open("s")
    body = _body(path, stream=True)

    first = await http.post(impatient.url + path, json=body, headers=_bearer(key))
    again = await http.post(impatient.url + path, json=body, headers=_bearer(key))

    assert _without_pings(path, first.text) == _without_pings(path, again.text)


def _without_pings(path: str, stream: str) -> list[str]:
    return [event for event in stream.split("\n\n") if not event.startswith(PINGS[path])]


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_failure_after_the_headers_ends_the_stream_with_an_error(
    impatient: LocalGateway, engine: ScriptedEngine, http: httpx.AsyncClient, path: str
) -> None:
    """A failure that can no longer set the status becomes an event of the dialect."""
    engine.faults = Faults(kind="status", status=400)
    key = await impatient.open("s")

    body = _body(path, stream=True)
    answer = await http.post(impatient.url + path, json=body, headers=_bearer(key))

    last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2]
    data = json.loads(last.rpartition("data: ")[2])
    assert (answer.status_code, data.get("type", "")) == (200, FAILURES[path])
    assert "the engine" in last


async def test_real_clients_read_through_pings(
    impatient: LocalGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both vendors' clients skip pings, and raise the error that ends a stream."""
    monkeypatch.setattr("perdure.engines.pool.engine_pool.MOST_MOVES", 0)
    import anthropic  # takes a second, so it is imported once per process
    import openai

    key = await impatient.open("s")
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    async with (
        anthropic.AsyncAnthropic(base_url=impatient.url, api_key=key, max_retries=0) as claude,
        openai.AsyncOpenAI(base_url=f"{impatient.url}/v1", api_key=key, max_retries=0) as gpt,
    ):
        async with claude.messages.stream(**ask, max_tokens=50) as messages:
            said = await messages.get_final_text()
        chunks = [c async for c in await gpt.chat.completions.create(**ask, stream=True)]
        engine.faults = Faults(kind="status", status=500)
        ask["messages"] = [{"role": "user", "content": "Again"}]
        with pytest.raises(anthropic.APIStatusError, match="the engine"):
            async with claude.messages.stream(**ask, max_tokens=50) as messages:
                await messages.get_final_text()
        with pytest.raises(openai.APIError, match="the engine"):
            [c async for c in await gpt.chat.completions.create(**ask, stream=True)]

    assert (said, "".join(c.choices[0].delta.content or "" for c in chunks)) == ("Hello.",) * 2


@pytest.mark.parametrize("path", [*DIALECTS, "/v1/messages/count_tokens", "/v1/messages?beta=true"])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_the_session_key_comes_in_either_header(
    gateway: LocalGateway, http: httpx.AsyncClient, path: str, header: str
) -> None:
    """Every dialect accepts both forms of the key, with any query."""
    key = await gateway.open("s")
    value = f"Bearer {key}" if header == "authorization" else key

    answer = await http.post(gateway.url + path, json=_body(path), headers={header: value})

    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("request_line", "headers", "kind"),
    [
        ("POST /v1/messages/batches", {}, "not_found_error"),
        ("GET /v1/messages", {}, "invalid_request_error"),
        ("GET /v1/files", {"anthropic-version": "2023-06-01"}, "not_found_error"),
        ("GET /v1/models", {"anthropic-version": "2023-06-01"}, "authentication_error"),
    ],
)
async def test_anthropics_clients_get_anthropics_errors(
    gateway: LocalGateway,
    http: httpx.AsyncClient,
    request_line: str,
    headers: dict[str, str],
    kind: str,
) -> None:
    """Errors for unknown routes, wrong methods and missing keys are in the caller's dialect."""
    method, path = request_line.split()
    answer = await http.request(method, gateway.url + path, headers=headers)

    assert answer.json()["error"]["type"] == kind


@pytest.mark.parametrize(
    "path",
    [
        "/update_weights",
        "/v1/update_weights",
        "/pause",
        "/flush_cache",
        "/inference/v1/generate",
        "/v1/completions",
        "/v1/messages/../../inference/v1/generate",
    ],
)
async def test_no_route_reaches_the_engines_control(
    gateway: LocalGateway, engine: ScriptedEngine, http: httpx.AsyncClient, path: str
) -> None:
    """A session key opens model calls and no other route."""
    key = await gateway.open("s")

    answer = await http.post(gateway.url + path, json={}, headers=_bearer(key))

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_route")


@pytest.mark.parametrize("path", DIALECTS)
async def test_headers_have_a_limit(
    gateway: LocalGateway, http: httpx.AsyncClient, path: str
) -> None:
    """Oversized headers are refused before or at the route, without a crash."""
    key = await gateway.open("s")
    headers = {**_bearer(key), **{f"x-{i}": "y" * 1000 for i in range(MAX_HEADERS // 1000 + 1)}}

    answer = await http.post(gateway.url + path, json=_body(path), headers=headers)

    assert answer.status_code in (400, 431)


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("path", DIALECTS)
async def test_a_hosted_engine_serves_every_dialect(
    tmp_path: Path, engine: ScriptedEngine, http: httpx.AsyncClient, path: str, kind: str
) -> None:
    """Requests of every dialect are sent to the hosted API, and its answer is framed in that
    dialect."""
    async with LocalGateway(
        tmp_path, engine={"url": engine.url, "kind": kind, "model": "hosted"}
    ) as gateway:
        key = await gateway.open("s")
        answer = await http.post(gateway.url + path, json=_body(path), headers=_bearer(key))

    assert (answer.status_code, "Hello." in answer.text) == (200, True)


async def one_turn(gateway: LocalGateway) -> Turn:
    """The answer as recorded for a client that requests the model `any`."""
    from openai import AsyncOpenAI

    key = await gateway.open("s-1")
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key) as client:
        await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "Hi"}]
        )
    await gateway.control.close("s-1")
    return decode((await gateway.store.get(turns_key_of("s-1"))).data)[0]


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_a_turn_records_the_model_asked_for_and_the_one_that_answered(
    tmp_path: Path, kind: str
) -> None:
    """If an endpoint answers with a dated name, the turn records both names."""
    asked = []

    async def answer(request: Request) -> JSONResponse:
        asked.append((await request.json())["model"])
        message = {"role": "assistant", "content": "Hello"}
        chat = {"choices": [{"message": message, "finish_reason": "stop"}]}
        text = {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}
        usage = {"input_tokens": 3, "output_tokens": 1}
        body = chat if kind == "openai" else {**text, "stop_reason": "end_turn", "usage": usage}
        return JSONResponse({"model": "gpt-x-2026-01-01", **body})

    routes = [Route(f"/v1/{path}", answer, methods=["POST"]) for path in PATHS]
    async with (
        served(Starlette(routes=routes)) as url,
        LocalGateway(tmp_path, engine={"url": url, "kind": kind, "model": "gpt-x"}) as gateway,
    ):
        turn = await one_turn(gateway)

    assert asked == ["gpt-x"]
    assert (turn.asked_model, turn.model) == ("gpt-x", "gpt-x-2026-01-01")


async def test_a_turn_of_a_token_engine_records_the_model_that_it_serves(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """The turn records the name from /v1/models, not the name `policy` under which the engine
    serves."""
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
        turn = await one_turn(gateway)

    assert turn.asked_model == "policy"
    assert turn.model.startswith("scripted:")


@pytest.mark.parametrize("path", DIALECTS)
async def test_the_agents_header_tells_its_calls(
    gateway: LocalGateway, http: httpx.AsyncClient, path: str
) -> None:
    """In every dialect, a call without the header that an earlier one had is not the agent's, also if
    the first call of the session had none."""
    key = await gateway.open("s")
    for number, own in enumerate(({}, {AGENT_HEADER: "m"}, {})):
        url = f"{gateway.url}{path}"
        body = _body(path, max_tokens=9, temperature=number / 4)
        answer = await http.post(url, json=body, headers=_bearer(key) | own)
        assert answer.status_code == 200
    await gateway.control.close("s")
    turns = decode((await gateway.store.get(turns_key_of("s"))).data)

    assert [turn.purpose for turn in turns] == [Purpose.STEP, Purpose.STEP, Purpose.STRAY]


@pytest.mark.parametrize(
    ("chat", "messages"),
    [
        ("auto", {"type": "auto"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f"}),
        ("anything", None),
    ],
)
def test_a_hosted_engine_is_told_the_tool_choice(chat: Any, messages: Any) -> None:
    """Both ways to write the tool choice have the same effect."""
    request = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "tools": [{"function": {"name": "f"}}],
        "tool_choice": chat,
    }

    assert to_messages(request, "m").get("tool_choice") == messages


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_compressed_body_is_refused_by_its_header(
    gateway: LocalGateway, http: httpx.AsyncClient, path: str
) -> None:
    """A body that would decompress to gigabytes is never decompressed."""
    headers = {**_bearer(await gateway.open("s")), "content-encoding": "gzip"}

    answer = await http.post(gateway.url + path, content=b"x", headers=headers)

    assert (answer.status_code, "uncompressed" in answer.text) == (415, True)


async def test_an_engine_that_is_away_is_overload_to_anthropics_clients(
    tmp_path: Path, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """529 makes Claude Code wait and retry; other clients react to 503."""
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    async with LocalGateway(tmp_path) as gateway:
        key = await gateway.open("s")
        answers = [
            await http.post(gateway.url + path, json=_body(path), headers=_bearer(key))
            for path in DIALECTS
        ]

    assert [answer.status_code for answer in answers] == [529, 503, 503]
    assert all("retry-after" in answer.headers for answer in answers)
