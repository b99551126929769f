"""Measures rollouts a minute on several nodes of Slurm, each with a worker of `perdure workers up --slurm`.

All nodes are on this machine and share its cores, so they add up only while agents wait for the model.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.throughput.resource_sampler import idle_seconds
from tests.hosts.slurm_cluster import SlurmCluster
from tests.hosts.slurm_daemons import SlurmDaemons, why_not
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running

CORES = os.cpu_count() or 1
BATCH_S = 3600.0
"""Limit on one batch."""


class Unavailable(Exception):
    """The message says what this machine lacks."""


@dataclass(frozen=True)
class SlurmFigures:
    """`right`: the batch's solved `rollouts`. `idle`: the idle share of all cores, 0 to 1."""

    nodes: int
    seats: int
    rollouts: int
    right: int
    per_minute: float
    idle: float


def measure(folder: Path, nodes: int, times: int, turns: int, latency_s: float) -> SlurmFigures:
    """A batch of `times` rollouts for each seat. Raises: Unavailable."""
    if missing := why_not() or why_not_here():
        raise Unavailable(missing)
    return asyncio.run(_measure(folder, nodes, times, turns, latency_s))


async def _measure(
    folder: Path, nodes: int, times: int, turns: int, latency_s: float
) -> SlurmFigures:
    slurm = SlurmDaemons(folder / "slurm", [f"node{number + 1}" for number in range(nodes)])
    async with running(folder / "stack", workers=0, turns=turns) as stack:
        cluster = SlurmCluster(folder, stack, slurm)
        try:
            await slurm.start()
            seats = sum((await cluster.up("--min", str(nodes))).values())
            await _solved(stack, "first", seats)  # nodes fill their caches
            stack.engine.latency_s = latency_s
            began, idle_before = time.monotonic(), idle_seconds()
            right = await _solved(stack, "batch", seats * times)
            took, idle = time.monotonic() - began, idle_seconds() - idle_before
            await cluster.workers("down", "--slurm")
        finally:
            await slurm.stop()
    rollouts = seats * times
    return SlurmFigures(nodes, seats, rollouts, right, 60 * rollouts / took, idle / took / CORES)


async def _solved(stack: Stack, run: str, count: int) -> int:
    requests = [await stack.start(run, sample_index=index) for index in range(count)]
    async with asyncio.timeout(BATCH_S):
        await asyncio.gather(*(stack.handle(request).result() for request in requests))
    episodes = [await stack.episode(request) for request in requests]
    return sum(episode.reward == 1.0 for episode in episodes)
