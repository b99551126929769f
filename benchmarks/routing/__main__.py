"""`python -m benchmarks.routing`: prefix-cache hits of the gateway's leases and of other routers.

`two gateways` have separate leases; each call of a session goes to either one, as connections do.
`--router PATH` puts vLLM's own router before the same engines, with each policy that uses sessions,
prompts or loads. This is the package vllm-router, in its own environment. Its policy `kv_aware` needs KV
events from the engines, which the modeled caches do not send.

Two scripted engines have a modeled prefix cache (blocks of 128 tokens, LRU) and prefill one prompt after
the other, which takes time. Sessions come in groups that share their opening prompt, all at once. Each
turn's prompt is the last prompt, its completion and a tool's result. A token is reusable if one engine
with an unlimited cache would have hit it in the same order of calls.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import httpx
import structlog

from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.token_endpoint import EngineRequest
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.engine_state import EngineSpec
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.token_salvage import Salvage
from perdure.testing.scripted_engine import CacheModel, PrefixCache, ScriptedEngine
from perdure.types import EngineSpan

BLOCK = 128
TURN = {"content": "I read the file and now I look at the next one. " * 3}
VOCABULARY = 140_000
ROUTER = "router "
POLICIES = (
    "round_robin",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
    "cache_aware",
)
ROUTER_START_S = 300.0
Ids = list[int]
Route = Callable[[str, str, Ids], Awaitable[Ids]]
"""Maps session, group and prompt to the completion."""


@dataclass(frozen=True)
class Job:
    """The sessions of one side. Lengths are in tokens."""

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
    """Hits as a share of all prompt tokens."""
    of_reusable: float
    """Hits as a share of those with an unlimited cache."""
    seconds: float
    busiest: float
    """Share of the calls that the busier engine got."""


async def side(name: str, job: Job, router: Path | None) -> Result:
    engines = [
        ScriptedEngine(
            {"default": {"turns": [TURN]}},
            cache=CacheModel(job.kv_tokens, BLOCK, job.prefill_per_s),
        )
        for _ in range(2)
    ]
    async with (
        httpx.AsyncClient(timeout=None) as client,
        contextlib.aclosing(Connections()) as connections,
        engines[0],
        engines[1],
    ):
        urls = [engine.url for engine in engines]
        if name.startswith(ROUTER):
            assert router is not None
            async with _router(router, name.removeprefix(ROUTER), urls) as url:
                return await _play(name, job, engines, _plain(name, [url], connections))
        if name in ("leases", "two gateways"):
            roster, count = InMemoryRoster(), 1 if name == "leases" else 2
            pools = [
                EnginePool(roster, client, [EngineSpec(url) for url in urls]) for _ in range(count)
            ]
            try:
                return await _play(name, job, engines, await _leased(pools))
            finally:
                for pool in pools:
                    await pool.aclose()
        return await _play(name, job, engines, _plain(name, urls, connections))


async def _in_time(limit_s: float, name: str, job: Job, router: Path | None) -> Result:
    async with asyncio.timeout(limit_s):
        return await side(name, job, router)


async def _leased(pools: list[EnginePool]) -> Route:
    for pool in pools:
        await pool.start()
    while not all(pooled.record.serves for pool in pools for pooled in pool.engines.values()):
        await asyncio.sleep(0.01)
    connections = random.Random(0)
    newest: dict[str, tuple[EnginePool, EngineSpan]] = {}

    async def route(session: str, group: str, prompt: Ids) -> Ids:
        pool = connections.choice(pools)
        before = newest.get(session)
        completion = await pool.generate(
            GenerateCall(
                prompt,
                {},
                session_id=session,
                request_id=session,
                labels={"group": group},
                # A gateway reads this from the session's journal if another gateway wrote the last turn.
                last=before[1] if before is not None and before[0] is not pool else None,
            )
        )
        newest[session] = (pool, completion.engines[-1])
        return list(completion.token_ids)

    return route


@contextlib.asynccontextmanager
async def _router(program: Path, policy: str, urls: list[str]) -> AsyncIterator[str]:
    """Runs vLLM's router before the engines; yields when it is healthy.

    Raises: RuntimeError if it ends or is not ready within `ROUTER_START_S`.
    """
    ports = [_free_port(), _free_port()]
    process = subprocess.Popen(
        [
            *(str(program), "--port", str(ports[0]), "--prometheus-port", str(ports[1])),
            *("--policy", policy, "--worker-startup-check-interval", "1"),
            *("--log-level", "error", "--worker-urls", *urls),
        ],
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        await _answers(process, url)
        yield url
    finally:
        await asyncio.to_thread(_end, process)


async def _answers(process: "subprocess.Popen[bytes]", url: str) -> None:
    end = time.monotonic() + ROUTER_START_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/health")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the router did not start at {url}: {process.poll()}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate it, and kill it after 10 s, because it waits for unused connections."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _plain(name: str, urls: list[str], connections: Connections) -> Route:
    """The choice of a router that ignores sessions or hashes them."""
    targets = [VllmEngine(url, url, connections) for url in urls]
    turns = cycle(targets)

    def choose(session: str) -> VllmEngine:
        if name == "hash":
            return targets[zlib.crc32(session.encode()) % len(targets)]
        return next(turns)

    async def route(session: str, group: str, prompt: Ids) -> Ids:
        salvage = Salvage()
        ask = EngineRequest("policy", prompt, {}, session, session)
        await choose(session).sample(ask, salvage, lambda: None)
        return list(salvage.ids)

    return route


async def _play(name: str, job: Job, engines: list[ScriptedEngine], route: Route) -> Result:
    endless = PrefixCache(CacheModel(1 << 40, BLOCK))
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
    parser.add_argument("--json", action="store_true", help="print one line of JSON per result")
    parser.add_argument("--router", type=Path, help="path of the program vllm-router")
    parser.add_argument("--sides", default="leases,two gateways,hash,round robin")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="stop a side after this many seconds"
    )
    for name, value in asdict(Job()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    rounds, as_json, router, sides, limit = (
        options.pop(name) for name in ("rounds", "json", "router", "sides", "limit")
    )
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    names = sides.split(",")
    if router is not None:
        names += [f"{ROUTER}{policy}" for policy in POLICIES]
    if not as_json:
        print(
            f"{'side':26} {'hit rate':>9} {'of reusable':>12} {'seconds':>8} {'busier engine':>14}"
        )
    for _ in range(rounds):
        for name in names:
            try:
                r = asyncio.run(_in_time(limit, name, Job(**options), router))
            except TimeoutError:
                print(f"{name}: not done after {limit:.0f} s", file=sys.stderr, flush=True)
                continue
            if as_json:
                print(json.dumps(asdict(r)), flush=True)
                continue
            print(
                f"{r.side:26} {r.hit_rate:9.1%} {r.of_reusable:12.1%} {r.seconds:8.2f} "
                f"{r.busiest:14.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
