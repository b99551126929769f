"""Agents of one engine through the gateway's real pool: they sample and use tools in virtual time."""

import asyncio
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import httpx

from benchmarks.saturation.engine import GRAIN, Counters, ModelledEngine, Wire
from benchmarks.saturation.law import Law
from perdure.engines.pool.call import GenerateCall
from perdure.engines.pool.fleet import PoolOptions
from perdure.engines.pool.leases import Capacity
from perdure.engines.pool.pool import EnginePool
from perdure.engines.pool.pooled_engine import PooledEngine
from perdure.engines.roster import LoneRoster
from perdure.engines.state import EngineSpec

URL = "http://engine:8000"
BATCHED = 3.0
"""Turns that an engine can do at once in about the time of one."""
SPREAD = 1.5
"""Sigma of a tool's log-normal time: half of the calls take under a third of the mean, one in 50 over
seven times."""


@dataclass(frozen=True)
class Job:
    """What the agents of one engine do. Lengths in tokens."""

    agents: int
    context: int = 8000
    """Mean context of a rollout, over its turns."""
    kv_tokens: int = 1_200_000
    ratio: float = 20.0
    """Seconds in tools per second that the engine needs for an undisturbed turn."""
    opening: int = 2000
    turns: int = 40
    output: int = 208
    tool_s: float = 5.0
    fresh: bool = False
    """Whether all agents begin a rollout at once, as in a run; otherwise each is at a random turn."""
    cycles: int = 24
    """Least number of measured turns per agent, after half as many for warming up."""

    @property
    def growth(self) -> int:
        """Growth of the prompt from one turn to the next."""
        return max(self.output + GRAIN, 2 * (self.context - self.opening) // self.turns)

    @property
    def alone_s(self) -> float:
        """The engine's seconds for an undisturbed turn."""
        return self.tool_s / self.ratio

    @property
    def cycle_s(self) -> float:
        """Seconds of a turn and its tool, even if the engine has far too many agents."""
        return self.tool_s + self.alone_s * max(1.0, self.agents / BATCHED)

    def law(self, measured: Law) -> Law:
        """The law of the measured engine, scaled to the ratio; its shape stays the same."""
        alone = measured.step(prompt=self.growth, pairs=self.growth * self.context)
        alone += self.output * measured.step(sequences=1, context=self.context)
        return measured.faster(alone * self.ratio / self.tool_s)


class Fixed(Capacity):
    """A fixed number of agents."""

    def __init__(self, agents: int) -> None:
        super().__init__(agents=agents)

    def observe(self, *_: object, **__: object) -> None:
        """Ignore the engine's metrics."""


@dataclass
class Seen:
    """What the agents saw during the measurement."""

    seconds: list[float] = field(default_factory=list)
    """Seconds from an agent's request to its answer, with the wait for room."""
    rollouts: int = 0


@dataclass(frozen=True)
class Result:
    """One side at one size. Rates are per second of virtual time."""

    policy: str
    job: Job
    busy: float
    """Share of the time in which the engine computes."""
    sampled_per_s: float
    alone_per_s: float
    """The engine's tokens per second for one agent without tools."""
    hits: float
    """Share of the prompt tokens that needed no prefill."""
    preemptions: int
    p50_s: float
    p95_s: float
    limit: int
    """Capacity at the end."""

    @property
    def gain(self) -> float:
        """Throughput in units of one agent that uses no tool."""
        return self.sampled_per_s / self.alone_per_s


async def play(policy: str, job: Job, measured: Law) -> Result:
    engine = ModelledEngine(job.law(measured), job.kv_tokens)
    seen = Seen()
    async with httpx.AsyncClient(transport=Wire(engine), timeout=None) as client:
        pool = EnginePool(LoneRoster(), client, [EngineSpec(URL)], PoolOptions(patience_s=math.inf))
        pool.leases.clock = asyncio.get_running_loop().time
        tasks = [asyncio.create_task(engine.run())]
        try:
            pooled = await _ready(pool, policy)
            for number in range(job.agents):
                tasks.append(asyncio.create_task(_agent(number, job, pool, seen)))
            await asyncio.sleep(job.cycles / 2 * job.cycle_s)
            before, seen.seconds = replace(engine.counters), []
            await asyncio.sleep(job.cycles * job.cycle_s)
            during = engine.counters.since(before)
            return _result(policy, job, pooled.capacity, during, seen.seconds)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pool.aclose()


async def _ready(pool: EnginePool, policy: str) -> PooledEngine:
    await pool.start()
    (pooled,) = pool.engines.values()
    while not pooled.record.serves:
        await asyncio.sleep(0.1)
    if policy != "adaptive":
        pooled.capacity = Fixed(int(policy.removeprefix("fixed ")))
    return pooled


async def _agent(number: int, job: Job, pool: EnginePool, seen: Seen) -> None:
    """Run one rollout after the other."""
    source = random.Random(number)
    first = 0 if job.fresh else source.randrange(job.turns)
    await asyncio.sleep(source.uniform(0, job.tool_s))
    loop = asyncio.get_running_loop()
    while True:
        session = f"{number}-{seen.rollouts}-{loop.time():.3f}"
        for prompt in _prompts(job, first):
            started = loop.time()
            await pool.generate(
                GenerateCall(
                    array("i", [1] * (prompt // GRAIN)),
                    {"max_tokens": job.output // GRAIN},
                    session,
                    session,
                )
            )
            seen.seconds.append(loop.time() - started)
            await asyncio.sleep(_tool_s(source, job))
        pool.leases.release(session)
        seen.rollouts += 1
        first = 0


def _prompts(job: Job, first: int) -> Iterator[int]:
    return (job.opening + turn * job.growth for turn in range(first, job.turns))


def _tool_s(source: random.Random, job: Job) -> float:
    return source.lognormvariate(math.log(job.tool_s) - SPREAD**2 / 2, SPREAD)


def _result(
    policy: str, job: Job, capacity: Capacity, during: Counters, waited: list[float]
) -> Result:
    seconds = job.cycles * job.cycle_s
    ordered = sorted(waited) or [math.inf]
    return Result(
        policy,
        job,
        busy=min(1.0, during.busy_s / seconds),
        sampled_per_s=during.sampled / seconds,
        alone_per_s=job.output / job.alone_s,
        hits=during.hits / max(1, during.queries),
        preemptions=during.preemptions,
        p50_s=ordered[len(ordered) // 2],
        p95_s=ordered[int(len(ordered) * 0.95)],
        limit=capacity.agents,
    )
