"""`python -m benchmarks.weights`: the pause that requests in flight see while weights are updated.

Sessions sample without a break through a gateway's pool. Every few seconds one update visits the
engines: announced, loaded, proven by its canaries, served. The largest gap between two chunks of a
completion during an update is compared with the largest without one in the same run. Each token's
recorded version is compared with the weights that sampled it.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import structlog

from benchmarks.scratch import scratch_folder
from benchmarks.weights.gaps import Chunks, Gap
from benchmarks.weights.sides import PROMPT, Side, scripted, vllm
from perdure.engines.base import Completion
from perdure.engines.clients.wire import new_client
from perdure.engines.pool.pool import EnginePool
from perdure.engines.roster import LoneRoster
from perdure.engines.state import EngineSpec
from perdure.engines.weights.update import Updated, UpdatePolicy, WeightUpdates

Kind = Literal["scripted", "vllm"]
InFlight = Literal["resubmit", "keep"]
SIDES: tuple[InFlight, ...] = ("resubmit", "keep")


@dataclass(frozen=True)
class Job:
    """Seconds, and tokens of a completion. `load`: the modelled load time of scripted engines."""

    sessions: int = 32
    updates: int = 3
    tokens: int = 3000
    chunk: float = 0.02
    load: float = 1.0
    quiet: float = 5.0


@dataclass(frozen=True)
class Result:
    engine: Kind
    engines: int
    in_flight: InFlight
    quiet_ms: float
    """Largest gap of all completions outside updates."""
    usual_ms: float
    """Median of each completion's largest gap during an update."""
    worst_ms: float
    ratio: float
    """The worst gap during an update over the largest without one."""
    stopped_ms: float
    """Median seconds that an engine was paused, with its canaries."""
    tokens: int
    versions_right: float
    both: int
    """Completions with two versions or more."""


@dataclass(frozen=True)
class Stand:
    """Engines behind a gateway's pool, and the updates of their weights."""

    kind: Kind
    side: Side
    pool: EnginePool
    updates: WeightUpdates


@contextlib.asynccontextmanager
async def engines(kind: Kind, count: int, job: Job, folder: Path) -> AsyncIterator[Side]:
    if kind == "vllm":
        async with vllm(folder, tokens=job.tokens) as real:
            yield real
        return
    async with scripted(
        count, folder, tokens=job.tokens, chunk_s=job.chunk, load_s=job.load
    ) as modelled:
        yield modelled


async def measure(kind: Kind, count: int, job: Job) -> list[Result]:
    """Both modes on the same engines, one after the other; version numbers continue."""
    with scratch_folder("perdure-bench-", keep=False) as folder:
        async with engines(kind, count, job, folder) as side, new_client() as client:
            roster = LoneRoster()
            pool = EnginePool(roster, client, [EngineSpec(url) for url in side.urls])
            try:
                await pool.start()
                while not all(pooled.record.serves for pooled in pool.engines.values()):
                    await asyncio.sleep(0.05)
                updates = WeightUpdates(roster, client)
                await updates.update(1, side.source(1), await side.canaries(1))
                stand = Stand(kind, side, pool, updates)
                return [
                    await _under_load(stand, in_flight, job, first=1 + number * job.updates)
                    for number, in_flight in enumerate(SIDES)
                ]
            finally:
                await pool.aclose()


async def _under_load(stand: Stand, in_flight: InFlight, job: Job, *, first: int) -> Result:
    """`first`: the version that is served at the start."""
    side, pool = stand.side, stand.pool
    completions: list[Completion] = []
    over = asyncio.Event()

    async def session(name: str) -> None:
        number = 0
        while not over.is_set():
            number += 1
            done = await pool.generate(
                PROMPT,
                dict(side.sampling),
                session_id=f"{in_flight}-{name}",
                request_id=f"{in_flight}-{name}-{number}",
            )
            completions.append(done)

    quiet: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    updated: list[Updated] = []
    # A trainer computes these while the old version samples, so do it before gaps are measured.
    canaries = {
        version: await side.canaries(version)
        for version in range(first + 1, first + job.updates + 1)
    }
    async with Chunks(pool).watched() as chunks, asyncio.TaskGroup() as tasks:
        for number in range(job.sessions):
            tasks.create_task(session(f"s{number}"))
        await asyncio.sleep(job.quiet)  # all sessions have begun
        for version, proof in canaries.items():
            started = time.monotonic()
            await asyncio.sleep(job.quiet)
            quiet.append((started, time.monotonic()))
            updated += await stand.updates.update(
                version, side.source(version), proof, UpdatePolicy(in_flight=in_flight)
            )
            while not all(pooled.record.version == version for pooled in pool.engines.values()):
                await asyncio.sleep(0.01)  # until the gateway has seen that they serve again
            busy.append((quiet[-1][1], time.monotonic()))
        over.set()
    calm = [gap for gaps in chunks.gaps(quiet) for gap in gaps if not _meets(gap, busy)]
    pauses = [max(gap.seconds for gap in gaps) for span in busy for gaps in chunks.gaps([span])]
    largest, worst = max(gap.seconds for gap in calm), max(pauses)
    tokens = sum(len(one.token_ids) for one in completions)
    wrong = await side.wrong(completions)
    return Result(
        engine=stand.kind,
        engines=len(side.urls),
        in_flight=in_flight,
        quiet_ms=largest * 1000,
        usual_ms=statistics.median(pauses) * 1000,
        worst_ms=worst * 1000,
        ratio=worst / largest,
        stopped_ms=statistics.median(one.paused_s for one in updated) * 1000,
        tokens=tokens,
        versions_right=1 - wrong / tokens,
        both=sum(len({span.version for span in one.versions}) > 1 for one in completions),
    )


def _meets(gap: Gap, spans: list[tuple[float, float]]) -> bool:
    return any(gap.meets(*span) for span in spans)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--engines", default="1,2", help="numbers of scripted engines")
    parser.add_argument("--json", action="store_true")
    for name, value in asdict(Job()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = vars(parser.parse_args())
    kind, counts, as_json = (options.pop(name) for name in ("engine", "engines", "json"))
    job = Job(**options)
    quiet = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=quiet)
    numbers = [1] if kind == "vllm" else [int(count) for count in counts.split(",")]
    results = [one for count in numbers for one in asyncio.run(measure(kind, count, job))]
    if not all(one.both for one in results):
        print(
            "in some rows no completion met an update: raise --tokens to make completions longer",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    print(
        f"{'engines':>12} {'in flight':9} {'quiet ms':>9} {'usual ms':>9} {'worst ms':>9} "
        f"{'ratio':>6} {'stopped ms':>11} {'tokens':>8} {'right':>8} {'two versions':>13}"
    )
    for r in results:
        print(
            f"{r.engines:3} {r.engine:8} {r.in_flight:9} {r.quiet_ms:9.0f} {r.usual_ms:9.0f} "
            f"{r.worst_ms:9.0f} {r.ratio:6.1f} {r.stopped_ms:11.0f} {r.tokens:8} "
            f"{r.versions_right:8.2%} {r.both:13}"
        )


if __name__ == "__main__":
    main()
