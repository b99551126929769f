"""Engines whose weights a test updates, and which weights made which token."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.engines.base import Completion
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.engine_state import EngineSpec, EngineState, name_of
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.weights.weight_update import (
    FromDisk,
    WeightCanary,
    WeightUpdates,
)
from perdure.testing.scripted_engine import WEIGHTS_FILE, ScriptedEngine, logprob
from tests.integration.engine_calls import LONG, PROMPT, TOKENIZER

FIRST = TOKENIZER.encode_plain("word0")[0]
NOTICE_S = 0.15


def checkpoint(folder: Path, weights: int, **more: Any) -> FromDisk:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS_FILE).write_text(json.dumps({"weights": weights, **more}))
    return FromDisk(folder)


def canary(weights: int) -> WeightCanary:
    """What a trainer's forward pass with these weights says."""
    return WeightCanary(
        prompt_ids=tuple(PROMPT),
        token_id=FIRST,
        logprob=logprob(FIRST, 0, weights),
        tolerance=0.01,
    )


@dataclass
class Stand:
    roster: InMemoryRoster
    pool: EnginePool
    updates: WeightUpdates
    engines: list[ScriptedEngine]

    def ask(self, **labels: str) -> "asyncio.Task[Completion]":
        sampling = {"max_tokens": 4000, "temperature": 0.0, "stop_token_ids": [151_645]}
        call = self.pool.generate(
            GenerateCall(PROMPT, sampling, session_id="s", request_id="s-0", labels=labels)
        )
        return asyncio.ensure_future(call)

    async def sampling(self, call: "asyncio.Task[Completion]") -> None:
        """Until a completion is well under way."""
        while not any(
            len(running.salvage.ids) >= 40
            for pooled in self.pool.engines.values()
            for running in pooled.running
        ):
            assert not call.done(), "it ended before it was well under way"
            await asyncio.sleep(0.005)

    async def seen(self, engine: ScriptedEngine, state: EngineState) -> None:
        """Until the pool knows what the update left behind."""
        while self.pool.engines[name_of(engine.url)].record.state is not state:
            await asyncio.sleep(0.005)

    def true_versions(self, completion: Completion) -> list[int]:
        """Which weights made each token, read off its logprob. Version and weights agree here."""
        return [
            next(w for w in (1, 2, 3) if logprob(token, i, w) == value)
            for i, (token, value) in enumerate(
                zip(completion.token_ids, completion.logprobs, strict=True)
            )
        ]


def recorded_versions(completion: Completion) -> list[int]:
    versions = [-1] * len(completion.token_ids)
    for span in completion.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


@asynccontextmanager
async def stand(count: int, delay_s: float = 0.0) -> AsyncIterator[Stand]:
    roster = InMemoryRoster()
    engines = [ScriptedEngine(LONG, chunk_delay_s=delay_s, policy_version=1) for _ in range(count)]
    async with new_client() as client:
        for engine in engines:
            engine.weights = 1
            await engine.__aenter__()
        pool = EnginePool(
            roster,
            client,
            [EngineSpec(e.url) for e in engines],
            PoolOptions(poll_s=0.03, hang_s=60),
        )
        await pool.start()
        try:
            while not all(pooled.record.serves for pooled in pool.engines.values()):
                await asyncio.sleep(0.005)
            yield Stand(roster, pool, WeightUpdates(roster, client, notice_s=NOTICE_S), engines)
        finally:
            await pool.aclose()
            for engine in engines:
                await engine.__aexit__()
