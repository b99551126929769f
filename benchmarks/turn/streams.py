"""CPU of a streamed token: what each event costs the gateway if an engine sends one event per token.

Many calls run at once, each at the pace of a loaded engine; then the same calls with every token in
the last event. The difference is the cost of streaming, with the journal of sampled tokens.
"""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from benchmarks.turn import sides
from benchmarks.turn.engine import InstantEngine
from perdure.gateway.base import SessionSpec
from perdure.gateway.control import GatewayControl
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.home import load_secrets
from perdure.settings.tree import Settings
from perdure.testing.scripted_policy import Policy

TOKENS, STREAMS, TOKENS_PER_S = 300, 32, 50.0
WORDS = "I read the file, and now I look at the next one to find where it is called from. "


class Streamed(NamedTuple):
    """CPU microseconds per token, by how the engine sends them, and the cost of one more event."""

    one_by_one: float
    all_at_the_end: float

    @property
    def streaming(self) -> float:
        return self.one_by_one - self.all_at_the_end


class PacedEngine(InstantEngine):
    """Samples `TOKENS_PER_S` in each call, and sends each token at once, or all at the end."""

    def __init__(self) -> None:
        super().__init__()
        turn = {"content": WORDS * (TOKENS // 15)}
        self.ids = Policy(load_tokenizer("qwen3"), {}).tokens(turn)[:TOKENS]
        self.one_by_one = True

    async def _vllm(self, request: Request) -> Response:
        asked = await request.json()
        if not asked.get("stream"):
            return await super()._vllm(request)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        began, step = clock(), 1 if self.one_by_one else len(self.ids)
        for start in range(0, len(self.ids), step):
            end = start + step
            await asyncio.sleep(began + end / TOKENS_PER_S - clock())
            yield _event(self.ids[start:end], "stop" if end >= len(self.ids) else None)
        yield b"data: [DONE]\n\n"


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
    """Both ways in turn, on one gateway; medians."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    async with (
        PacedEngine() as engine,
        sides.perdure(home, engine.url) as serving,
        GatewayControl(serving.url, load_secrets(Settings(home=home))) as control,
        httpx.AsyncClient(base_url=serving.url, timeout=120, trust_env=False) as client,
    ):
        keys = [await _opened(control, f"stream-{number}") for number in range(STREAMS)]
        for number in range(rounds):
            for one_by_one, found in spent.items():
                engine.one_by_one = one_by_one
                before = sides.cpu_ms(serving.pid)
                text = f"Round {number}, {'one by one' if one_by_one else 'at the end'}."
                await asyncio.gather(*(_call(client, key, text) for key in keys))
                used = sides.cpu_ms(serving.pid) - before
                found.append(1000 * used / (STREAMS * len(engine.ids)))
    return Streamed(*map(statistics.median, spent.values()))


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
