"""`python -m benchmarks.routing`: prefix-cache hits of the gateway's leases beside other routings.

Two scripted engines with a modelled prefix cache (blocks of 128 tokens, LRU) and a prefill that costs
time, one prompt after the other. Sessions come in groups with one opening prompt, all at once, and
take turns; each turn's prompt is all of the last one, its completion and a tool's result. Reusable is
what one engine with an endless cache would have hit in the same order of calls.
"""

import argparse
import asyncio
import json
import random
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from itertools import cycle

import httpx

from perdure.gateway.engines.pool import EnginePool, EngineSpec
from perdure.gateway.engines.salvage import Salvage
from perdure.gateway.engines.vllm import Ask, VllmEngine
from perdure.gateway.engines.wire import new_client
from perdure.serving.roster import LoneRoster
from perdure.testing.scripted_engine import PrefixCache, ScriptedEngine

BLOCK = 128
TURN = {"content": "I read the file and now I look at the next one. " * 3}
VOCABULARY = 140_000
Ids = list[int]
Route = Callable[[str, str, Ids], Awaitable[Ids]]
"""Session, group and prompt to the completion."""


@dataclass(frozen=True)
class Job:
    """The sessions of one side. Lengths in tokens."""

    groups: int = 6
    samples: int = 8
    turns: int = 6
    opening: int = 2000
    result: int = 500
    kv_tokens: int = 200_000
    prefill_per_s: float = 30_000.0


@dataclass(frozen=True)
class Result:
    side: str
    hit_rate: float
    """Of all prompt tokens."""
    of_reusable: float
    """Hits over what an endless cache would have hit."""
    seconds: float
    busiest: float
    """Calls of the busier engine over those of both."""


async def side(name: str, job: Job) -> Result:
    engines = [
        ScriptedEngine(
            {"default": {"turns": [TURN]}},
            kv_tokens=job.kv_tokens,
            block=BLOCK,
            prefill_per_s=job.prefill_per_s,
        )
        for _ in range(2)
    ]
    async with new_client() as client, engines[0], engines[1]:
        if name == "leases":
            pool = EnginePool(LoneRoster(), client, [EngineSpec(e.url) for e in engines])
            try:
                await pool.start()
                while not all(seat.record.serves for seat in pool.seats.values()):
                    await asyncio.sleep(0.01)
                return await _play(name, job, engines, _leased(pool))
            finally:
                await pool.aclose()
        return await _play(name, job, engines, _plain(name, engines, client))


def _leased(pool: EnginePool) -> Route:
    async def route(session: str, group: str, prompt: Ids) -> Ids:
        completion = await pool.generate(
            prompt, {}, session_id=session, request_id=session, labels={"group": group}
        )
        return list(completion.token_ids)

    return route


def _plain(name: str, engines: list[ScriptedEngine], client: httpx.AsyncClient) -> Route:
    """What a router that knows no sessions does, or one that hashes them."""
    targets = [VllmEngine(engine.url, engine.url, client) for engine in engines]
    turns = cycle(targets)

    def choose(session: str) -> VllmEngine:
        if name == "hash":
            return targets[zlib.crc32(session.encode()) % len(targets)]
        return next(turns)

    async def route(session: str, group: str, prompt: Ids) -> Ids:
        salvage = Salvage()
        ask = Ask("policy", prompt, {}, session, session)
        await choose(session).sample(ask, salvage, lambda: None)
        return list(salvage.ids)

    return route


async def _play(name: str, job: Job, engines: list[ScriptedEngine], route: Route) -> Result:
    endless = PrefixCache(1 << 40, BLOCK)
    started = time.monotonic()

    async def session(group: int, sample: int) -> None:
        own = random.Random(f"{group}/{sample}")
        prompt = _ids(random.Random(group), job.opening)
        for _ in range(job.turns):
            endless.look(prompt)
            endless.keep(prompt)
            completion = await route(f"{group}-{sample}", f"{group}", prompt)
            endless.keep([*prompt, *completion])
            await asyncio.sleep(own.uniform(0.0, 0.05))  # the agent's tool
            prompt = [*prompt, *completion, *_ids(own, job.result)]

    async with asyncio.TaskGroup() as tasks:
        for group in range(job.groups):
            for sample in range(job.samples):
                tasks.create_task(session(group, sample))
    seconds = time.monotonic() - started
    hits = sum(engine.cache.hits for engine in engines)
    queries = sum(engine.cache.queries for engine in engines)
    calls = [engine.stats().calls for engine in engines]
    return Result(name, hits / queries, hits / endless.hits, seconds, max(calls) / sum(calls))


def _ids(source: random.Random, count: int) -> Ids:
    return [source.randrange(1000, VOCABULARY) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    for name, value in asdict(Job()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    rounds, as_json = options.pop("rounds"), options.pop("json")
    results = [
        asyncio.run(side(name, Job(**options)))
        for _ in range(rounds)
        for name in ("leases", "hash", "round robin")
    ]
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    print(f"{'side':12} {'hit rate':>9} {'of reusable':>12} {'seconds':>8} {'busier engine':>14}")
    for r in sorted(results, key=lambda r: r.side):
        print(
            f"{r.side:12} {r.hit_rate:9.1%} {r.of_reusable:12.1%} {r.seconds:8.2f} {r.busiest:14.0%}"
        )


if __name__ == "__main__":
    main()
