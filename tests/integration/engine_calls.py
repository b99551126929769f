"""Pools of engines for tests, and long calls to them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from perdure.engines.base import Completion
from perdure.engines.engine_roster import InMemoryRoster, SharedRoster
from perdure.engines.engine_state import EngineSpec
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_capacity import Capacity
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.pooled_engine import PooledEngine
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.scripted_engine import ScriptedEngine

LONG = {"default": {"turns": [{"content": " ".join(f"word{n}" for n in range(120))}]}}
TOKENIZER = load_tokenizer("qwen3")
PROMPT = [
    *TOKENIZER.encode_plain("The task."),
    TOKENIZER.convert_tokens_to_ids("<|im_start|>"),
    *TOKENIZER.encode_plain("assistant\n"),
]
STOP = 151_645
SAMPLING: dict[str, Any] = {"max_tokens": 4000, "temperature": 0.0, "stop_token_ids": [STOP]}


@asynccontextmanager
async def opened(
    client: httpx.AsyncClient, *urls: str, roster: SharedRoster | None = None, **options: Any
) -> AsyncIterator[EnginePool]:
    pool = EnginePool(
        roster or InMemoryRoster(),
        client,
        [EngineSpec(url) for url in urls],
        PoolOptions(**{"poll_s": 0.05, "hang_s": 60.0, **options}),
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.aclose()


def ask(pool: EnginePool, session: str = "s", **labels: str) -> "asyncio.Task[Completion]":
    call = pool.generate(
        GenerateCall(PROMPT, SAMPLING, session_id=session, request_id=f"{session}-0", labels=labels)
    )
    return asyncio.ensure_future(call)


async def until(condition: Callable[[], Any]) -> Any:
    while not (found := condition()):
        await asyncio.sleep(0.01)
    return found


async def ready(pool: EnginePool, count: int) -> None:
    await until(lambda: sum(pooled.record.serves for pooled in pool.engines.values()) == count)


async def sampling(pool: EnginePool, tokens: int = 40) -> PooledEngine:
    """The engine of a running call that has already sampled this many of its tokens."""

    def busy() -> PooledEngine | None:
        for pooled in pool.engines.values():
            if any(len(call.salvage.ids) >= tokens for call in pooled.running):
                return pooled
        return None

    pooled: PooledEngine = await until(busy)
    return pooled


async def undisturbed() -> list[int]:
    async with ScriptedEngine(LONG) as engine:
        return engine.policy.complete(PROMPT)


class Fixed(Capacity):
    """A number of agents that stays."""

    def observe(self, *_: object, **__: object) -> None:
        """The engine's answer, of any status."""
