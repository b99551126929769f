"""Measures the CPU of a streamed token, by how many tokens an engine sends together.

Many calls run at once, each at the pace of a loaded engine: one event per token, then as many tokens per
event as the gateway asks engines for, then all tokens in the last event.
"""

import asyncio
import itertools
import json
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from benchmarks.turn import turn_servers
from benchmarks.turn.instant_engine import InstantEngine
from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import GatewayControl
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.home_folder import load_secrets
from perdure.settings.settings_tree import Settings
from perdure.testing.scripted_policy import Policy

TOKENS, STREAMS, TOKENS_PER_S = 300, 32, 50.0
WORDS = "I read the file, and now I look at the next one to find where it is called from. "


class Way(Enum):
    """How an engine sends its tokens."""

    ONE_BY_ONE = "one by one"
    AS_ASKED = "as asked"
    """The first token at once, then events of the size that the gateway asks for, then the rest."""
    AT_THE_END = "at the end"


class Streamed(NamedTuple):
    """CPU microseconds per token, and how many tokens the gateway asks for together."""

    one_by_one: float
    as_asked: float
    at_the_end: float
    together: int

    @property
    def event(self) -> float:
        """The cost of one more event."""
        return self.one_by_one - self.at_the_end


class PacedEngine(InstantEngine):
    """Samples `TOKENS_PER_S` tokens per second in each call."""

    def __init__(self) -> None:
        super().__init__()
        turn = {"content": WORDS * (TOKENS // 15)}
        self.ids = Policy(load_tokenizer("qwen3"), {}).tokens(turn)[:TOKENS]
        self.way = Way.ONE_BY_ONE
        self.together = 1
        """The value from the newest request."""

    async def _vllm(self, request: Request) -> Response:
        asked = await request.json()
        if not asked.get("stream"):
            return await super()._vllm(request)
        self.together = int(asked["sampling_params"].get("stream_interval", 1))
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        began = clock()
        for start, end in itertools.pairwise((0, *self._ends())):
            await asyncio.sleep(began + end / TOKENS_PER_S - clock())
            yield _event(self.ids[start:end], "stop" if end == len(self.ids) else None)
        yield b"data: [DONE]\n\n"

    def _ends(self) -> Iterator[int]:
        """The token counts at which an event ends."""
        if self.way is not Way.AT_THE_END:
            step = 1 if self.way is Way.ONE_BY_ONE else self.together
            yield from range(1, len(self.ids), step)
        yield len(self.ids)


def _event(ids: Sequence[int], reason: str | None) -> bytes:
    content = [{"token_id": one, "logprob": -0.5, "rank": 1, "top_logprobs": []} for one in ids]
    choice = {
        "index": 0,
        "token_ids": list(ids),
        "logprobs": {"content": content},
        "finish_reason": reason,
    }
    return b"data: " + json.dumps({"request_id": "0", "choices": [choice]}).encode() + b"\n\n"


async def measure(home: Path, rounds: int) -> Streamed:
    """Measures all ways in turn on one gateway; returns medians."""
    spent: dict[Way, list[float]] = {way: [] for way in Way}
    async with (
        PacedEngine() as engine,
        turn_servers.perdure(home, engine.url) as serving,
        GatewayControl(serving.url, load_secrets(Settings(home=home))) as control,
        httpx.AsyncClient(base_url=serving.url, timeout=120, trust_env=False) as client,
    ):
        keys = [await _opened(control, f"stream-{number}") for number in range(STREAMS)]
        for number in range(rounds):
            for way, found in spent.items():
                engine.way = way
                before = turn_servers.cpu_ms(serving.pid)
                text = f"Round {number}, {way.value}."
                await asyncio.gather(*(_call(client, key, text) for key in keys))
                used = turn_servers.cpu_ms(serving.pid) - before
                found.append(1000 * used / (STREAMS * len(engine.ids)))
    one_by_one, as_asked, at_the_end = map(statistics.median, spent.values())
    return Streamed(one_by_one, as_asked, at_the_end, engine.together)


async def _opened(control: GatewayControl, name: str) -> str:
    await control.open(SessionSpec(session_id=name, turns_key=f"{name}.parquet"))
    return control.key(name)


async def _call(client: httpx.AsyncClient, key: str, text: str) -> None:
    body: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": text}],
    }
    headers = {"authorization": f"Bearer {key}"}
    (await client.post("/v1/messages", json=body, headers=headers)).raise_for_status()
