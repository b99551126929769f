"""When a connection to an engine is reused after a completion."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.sglang import SglangEngine
from perdure.engines.clients.token_endpoint import EngineRequest
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import FinishReason

Client = type[VllmEngine] | type[SglangEngine]
LAST = {
    VllmEngine: {
        "choices": [
            {
                "token_ids": [5],
                "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]},
                "finish_reason": "stop",
            }
        ]
    },
    SglangEngine: {
        "meta_info": {
            "output_token_logprobs": [[-0.5, 5, None]],
            "finish_reason": {"type": "stop"},
            "completion_tokens": 1,
        }
    },
}
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Endpoint:
    """Answers each request with one event that has a finish reason; then sends `[DONE]`, or nothing
    more."""

    def __init__(self, event: bytes, *, ends: bool) -> None:
        self.ended: list[asyncio.Event] = []
        self._event, self._ends = event, ends

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = asyncio.Event()
        self.ended.append(ended)
        with contextlib.suppress(ConnectionError):
            while head := await reader.read(1 << 16):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length - len(head.partition(b"\r\n\r\n")[2]))
                writer.write(HEAD + _chunk(self._event))
                await writer.drain()
                if self._ends:
                    writer.write(_chunk(b"data: [DONE]\n\n") + _chunk(b""))
        writer.close()
        ended.set()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@asynccontextmanager
async def serving(kind: Client, *, ends: bool) -> AsyncIterator[tuple[Endpoint, str]]:
    endpoint = Endpoint(b"data: " + json.dumps(LAST[kind]).encode() + b"\n\n", ends=ends)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    async with server:
        yield endpoint, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for ended in endpoint.ended:
            await ended.wait()


async def _sampled(kind: Client, url: str, times: int) -> list[FinishReason]:
    async with aclosing(Connections()) as connections:
        engine = kind("e", url, connections)
        ask = EngineRequest("policy", [1], {"max_tokens": 9}, "s", "r")
        return [await engine.sample(ask, Salvage(), lambda: None) for _ in range(times)]


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_calls_of_an_engine_share_a_connection(kind: Client) -> None:
    """The stream is read to its end, so that the next turn need not connect."""
    async with serving(kind, ends=True) as (endpoint, url):
        reasons = await _sampled(kind, url, 3)

    assert (reasons, len(endpoint.ended)) == ([FinishReason.STOP] * 3, 1)


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_stream_that_does_not_end_delays_no_answer(kind: Client) -> None:
    """The finish reason ends the answer. If the stream does not end, its connection is closed."""
    async with serving(kind, ends=False) as (endpoint, url):
        reasons = await _sampled(kind, url, 2)

    assert (reasons, len(endpoint.ended)) == ([FinishReason.STOP] * 2, 2)
