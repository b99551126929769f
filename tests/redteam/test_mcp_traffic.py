"""Hostile code calls its session's MCP servers itself, and a hostile server answers: no call is hidden from
the record, none reaches another session's server, and the gateway's memory and time stay bounded."""

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from perdure.gateway.mcp import event_stream, mcp_call_record
from perdure.testing.local_gateway import LocalGateway
from tests.unit.gateway.test_mcp_proxy import Stand, result, stand

__all__ = ["stand"]

CALL = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "delete_all"}}


async def send(stand: Stand, body: bytes, key: str = "", **headers: str) -> tuple[int, Any]:
    """What the gateway answers to these bytes."""
    own = {"authorization": f"Bearer {key or stand.key}", "content-type": "application/json"}
    answer = await stand.http.post("/v1/mcp/docs", content=body, headers={**own, **headers})
    return answer.status_code, answer


# --- the agent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [None, 1.5, True, [7], {"a": 1}])
async def test_no_call_escapes_the_record_by_its_id(stand: Stand, number: Any) -> None:
    """The record is of requests with an id, and a sloppy server answers others too."""
    status, _ = await send(stand, json.dumps({**CALL, "id": number}).encode())

    assert (status, stand.server.seen) == (400, [])


@pytest.mark.parametrize(
    "body",
    [
        b'{"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "delete_all"}}',
        b'[{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "delete_all"}}]',
        b'{"jsonrpc": "2.0", "id": 7, "method": ["tools/call"]}',
        b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"a": NaN}}',
        b'{"id": 7, "method": "tools/call", "params": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"id": 7, "method": "tools/call", "params": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b"",
        b"\xff\xfe",
    ],
)
async def test_odd_messages_reach_no_server_unrecorded(stand: Stand, body: bytes) -> None:
    """They are refused, or the record has them."""
    status, _ = await send(stand, body)
    reached = len(stand.server.seen)

    assert status in (200, 400)
    assert len(await stand.calls() if reached else []) == reached


async def test_a_key_that_is_named_twice_means_one_thing(stand: Stand) -> None:
    """The server gets what is recorded, not the bytes, of which it might read another value."""
    heard: list[bytes] = []

    async def listens(message: dict[str, Any]) -> Response:
        heard.append(await stand.server.seen[-1].body())
        return JSONResponse(result(message))

    stand.server.answer = listens
    twice = b'{"id": 7, "method": "tools/call", "params": {"name": "a"}, "params": {"name": "b"}}'
    await send(stand, twice)
    (recorded,) = await stand.calls()

    assert heard == [b'{"id": 7, "method": "tools/call", "params": {"name": "b"}}']
    assert recorded["tool"] == "b"


async def test_another_sessions_key_and_server_are_of_no_use(stand: Stand) -> None:
    """The key decides which servers there are, whatever names and ids its holder knows."""
    mine, _ = await send(stand, json.dumps(CALL).encode(), key=stand.other_key)
    forged, _ = await send(stand, json.dumps(CALL).encode(), key=f"a.{stand.other_key}")

    assert (mine, forged) == (404, 401)
    assert stand.server.seen == stand.other.seen == []


async def test_headers_cannot_add_headers(stand: Stand) -> None:
    """Neither the server's credentials nor its own routing can be replaced."""
    evil = {"host": "evil", "x-forwarded-for": "10.0.0.1", "proxy-authorization": "Basic eA=="}
    await send(stand, json.dumps(CALL).encode(), **{"mcp-name": "a\tb", **evil})
    got = stand.server.seen[0].headers

    assert got["host"] != "evil"
    assert not {"x-forwarded-for", "proxy-authorization"} & set(got)
    assert got["authorization"].startswith("Bearer only-the-gateway")


async def test_a_repeated_relayed_call_is_not_done_twice(stand: Stand) -> None:
    """The relay's host may die during a call, and another one sends it again. The attempt then ends, in
    every process, and the tool has run once."""
    relayed = {"x-perdure-relayed": "f" * 32}
    first, _ = await send(stand, json.dumps(CALL).encode(), **relayed)
    async with LocalGateway(
        stand.gateway.settings.home, store=stand.gateway.store, engine={"url": "http://127.0.0.1:1"}
    ) as other:
        key = {"authorization": f"Bearer {stand.key}"}
        again = await stand.http.post(
            f"{other.url}/v1/mcp/docs", json=CALL, headers={**key, **relayed}
        )

    assert (first, len(stand.server.seen)) == (200, 1)
    assert "was lost on the way to the sandbox" in again.json()["error"]["message"]
    assert "was lost on the way to the sandbox" in (await stand.summary()).mcp_failed


# --- the server --------------------------------------------------------------------------------


async def test_a_redirect_leads_nowhere(stand: Stand) -> None:
    """Not to a server inside the gateway's network either: nothing is followed."""

    async def moves(message: dict[str, Any]) -> Response:
        return Response(status_code=307, headers={"location": stand.other_url})

    stand.server.answer = moves
    await send(stand, json.dumps(CALL).encode())

    assert stand.other.seen == []
    assert "redirects to" in (await stand.summary()).mcp_failed


async def test_a_compressed_bomb_is_not_unpacked(stand: Stand) -> None:
    """A few kilobytes would become gigabytes before their size could be counted."""
    bomb = gzip.compress(b"x" * (64 << 20))

    async def packs(message: dict[str, Any]) -> Response:
        return Response(bomb, headers={"content-encoding": "gzip"}, media_type="application/json")

    stand.server.answer = packs
    _, answer = await send(stand, json.dumps(CALL).encode())

    assert "compresses its answers" in answer.json()["error"]["message"]
    assert "compresses its answers" in (await stand.summary()).mcp_failed


async def test_an_endless_stream_ends(stand: Stand) -> None:
    """In bytes, although each event is small and the answer never comes."""

    async def forever() -> AsyncIterator[bytes]:
        while True:
            yield b'data: {"method": "notifications/progress"}\n\n' * 1000
            await asyncio.sleep(0)

    async def streams(message: dict[str, Any]) -> Response:
        return StreamingResponse(forever(), media_type="text/event-stream")

    stand.server.answer = streams
    _, answer = await send(stand, json.dumps(CALL).encode())

    assert "the answer exceeds 8 MiB" in answer.text[-200:]
    assert len(answer.content) < event_stream.LARGEST_ANSWER + 1000
    assert (await stand.summary()).mcp_failed == ""


async def test_a_stream_that_drips_ends(stand: Stand) -> None:
    """In time, although a byte arrives every moment."""
    key = await stand.open("drip", timeout_s=0.5)

    async def forever() -> AsyncIterator[bytes]:
        while True:
            yield b":\n"
            await asyncio.sleep(0.05)

    async def streams(message: dict[str, Any]) -> Response:
        return StreamingResponse(forever(), media_type="text/event-stream")

    stand.server.answer = streams
    _, answer = await send(stand, json.dumps(CALL).encode(), key=key)

    assert "the call took more than 0.5 s" in answer.text


def test_tiny_chunks_cost_no_more_than_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of a stream is searched a few times at most, not again with each chunk."""
    searched: list[int] = []

    class Pattern:
        def finditer(self, data: bytes, start: int) -> Iterator[re.Match[bytes]]:
            searched.append(len(data) - start)
            return event_end.finditer(data, start)

    event_end = event_stream._EVENT_END
    monkeypatch.setattr(event_stream, "_EVENT_END", Pattern())
    data, rest = b"x" * 10_000 + b"\r\n\r\nend", bytearray()
    chunks = [data[at : at + 1] for at in range(len(data))]
    events = [one for chunk in chunks for one in event_stream.taken_events(rest, chunk)]

    assert (events, bytes(rest)) == ([data[:-3]], b"end")
    assert sum(searched) <= 4 * len(data)


async def test_answers_that_nest_too_deep_are_passed_on(stand: Stand) -> None:
    """The agent still gets an answer that the gateway cannot serialise, and the call still ends."""
    deep = b'{"jsonrpc": "2.0", "id": 7, "result": ' + b"[" * 900 + b"]" * 900 + b"}"

    async def nests(message: dict[str, Any]) -> Response:
        return Response(deep, media_type="application/json")

    stand.server.answer = nests
    status, answer = await send(stand, json.dumps(CALL).encode())
    (recorded,) = await stand.calls()

    assert (status, answer.content) == (200, deep)
    assert recorded["ended"] == "answered"


def test_what_cannot_be_written_down_is_left_out() -> None:
    """A value at the interpreter's limit is read in one place, and too deep for another."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    assert mcp_call_record.shown({"content": deep}) == ""


async def test_a_server_cannot_answer_in_another_calls_place(stand: Stand) -> None:
    """Its answer has another id: the agent's call is still open when the stream ends."""

    async def confuses(message: dict[str, Any]) -> Response:
        event = b"data: " + json.dumps(result({**message, "id": 8})).encode() + b"\n\n"
        return StreamingResponse(iter([event]), media_type="text/event-stream")

    stand.server.answer = confuses
    await send(stand, json.dumps(CALL).encode())

    assert "ended a call without an answer" in (await stand.summary()).mcp_failed
