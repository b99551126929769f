"""`python -m benchmarks.ray_workers`: workers that Ray keeps, beside one that is started by hand.

Real Ray nodes on this machine, a scripted engine, the loop agent of the tests. Reported: how soon a node
that joins works, how soon work goes on after a kill -9, a spot notice and the head's end, what a node's
actors cost at rest, and rollouts a minute beside the same worker without Ray.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measuring import Memory, command_of, own_seconds
from benchmarks.options import add_output
from benchmarks.scratch import scratch_folder
from perdure.serving.cluster import process_tree
from tests.serving.ray_workers import PATIENCE_S, Cluster, a_cluster, polls
from tests.stack.host import why_not_here
from tests.stack.stack import Stack
from tests.stack.waiting import until

SEATS = 2
"""Of each worker, with Ray and without."""
JOINED_AIM_S = 20.0


@dataclass
class Part:
    """Processes at rest."""

    cpu_ms: float
    """A second."""
    pss_mb: float


@dataclass
class Found:
    plain_start_s: list[float] = field(default_factory=list)
    joined_s: list[float] = field(default_factory=list)
    """From the end of `ray start` on a new node until its worker polls."""
    killed_s: float = 0.0
    head_s: float = 0.0
    kept: bool = False
    """After the head's end, every worker was the one from before."""
    noticed_s: float = 0.0
    plain_rate: list[float] = field(default_factory=list)
    ray_rate: list[float] = field(default_factory=list)
    """Rollouts a minute."""
    rest: dict[str, Part] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if missing := why_not_here():
        print(missing, file=sys.stderr)
        return 1
    with scratch_folder("perdure-ray-", keep=options.keep) as folder:
        found = asyncio.run(_measure(folder, options))
    if options.json:
        parts = {name: vars(part) for name, part in found.rest.items()}
        options.json.write_text(json.dumps(vars(found) | {"rest": parts}, indent=1) + "\n")
    print(_table(found, options))
    return 0 if found.kept else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_workers")
    parser.add_argument("--nodes", type=int, default=3, help="that join one after the other")
    parser.add_argument(
        "--rollouts", type=int, default=40, help="of each round, with Ray and without"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=20.0, help="seconds at rest")
    add_output(parser)
    return parser.parse_args(arguments)


async def _measure(folder: Path, options: argparse.Namespace) -> Found:
    found = Found()
    tables = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
    runs = itertools.count()
    async with a_cluster(folder, **tables) as cluster:
        first = cluster.add("first", cpus=SEATS)
        for _ in range(options.rounds):
            found.plain_start_s.append(await _plain_worker(cluster.stack))
            found.plain_rate.append(await _rate(cluster, f"plain-{next(runs)}", options.rollouts))
            await cluster.stack.kill_all(*cluster.stack.workers, signum=signal.SIGTERM)
            assert await cluster.up() == {"first": SEATS}
            await _polls(cluster, "first", cluster.polls("first") + 1)
            found.ray_rate.append(await _rate(cluster, f"ray-{next(runs)}", options.rollouts))
            if len(found.ray_rate) < options.rounds:
                await cluster.workers("down")
        found.rest = await _rest(cluster, first.pid, options.rest)
        for number in range(options.nodes):
            name = f"joins-{number}"
            await asyncio.to_thread(cluster.add, name, cpus=SEATS)
            found.joined_s.append(await _polls(cluster, name, 1))
            print(f"{name}: {found.joined_s[-1]:.1f} s", file=sys.stderr, flush=True)
        found.killed_s = await _killed(cluster)
        found.head_s, found.kept = await _headless(cluster)
        found.noticed_s = await _noticed(cluster, options.nodes)
    return found


async def _plain_worker(stack: Stack) -> float:
    """Seconds from its start until it polls."""
    before = polls(stack.home)
    began = time.monotonic()
    starting = asyncio.create_task(stack.start_worker(PERDURE_SLOTS__AGENT=str(SEATS)))
    await until(lambda: polls(stack.home) > before, "it polls")
    seconds = time.monotonic() - began
    await starting
    return seconds


async def _polls(cluster: Cluster, name: str, times: int) -> float:
    """Seconds from now until this node's worker has begun to poll for the `times`-th time."""
    began = time.monotonic()
    await until(lambda: cluster.polls(name) >= times, f"the worker of {name} polls", PATIENCE_S)
    return time.monotonic() - began


async def _rate(cluster: Cluster, run: str, count: int) -> float:
    """Rollouts a minute; all must be solved."""
    await cluster.end([await cluster.stack.start(f"{run}-warm", sample_index=k) for k in range(2)])
    began = time.monotonic()
    await cluster.end([await cluster.stack.start(run, sample_index=k) for k in range(count)])
    rate = count / (time.monotonic() - began) * 60
    print(f"{run}: {rate:.0f} a minute", file=sys.stderr, flush=True)
    return rate


async def _rest(cluster: Cluster, node: int, seconds: float) -> dict[str, Part]:
    """What runs for one node while nothing is to do, and the manager on the head."""
    names = ("Ray's node", "its actor", "its worker", "the manager")
    parts: dict[str, list[int]] = {name: [] for name in names}
    for pid in process_tree(node):
        command = command_of(pid)
        if "workers." in command or "perdure.serving.supervisor" in command:
            parts["its worker"].append(pid)
        else:
            parts["its actor" if "ray::NodeActor" in command else "Ray's node"].append(pid)
    for pid in process_tree(cluster.nodes.head.pid):
        if command_of(pid).startswith("ray::") and "Manager" in command_of(pid):
            parts["the manager"].append(pid)
    before = {name: sum(map(own_seconds, pids)) for name, pids in parts.items()}
    await asyncio.sleep(seconds)
    return {
        name: Part(
            (sum(map(own_seconds, pids)) - before[name]) / seconds * 1e3, Memory.of(pids).pss
        )
        for name, pids in parts.items()
    }


async def _killed(cluster: Cluster) -> float:
    before = cluster.polls("first")
    os.kill(cluster.worker("first"), signal.SIGKILL)
    return await _polls(cluster, "first", before + 1)


async def _headless(cluster: Cluster) -> tuple[float, bool]:
    """Seconds until the next manager has found all workers, from when the head runs again; whether none
    of them was started again."""
    nodes = await cluster.starts()
    before = {name: cluster.polls(name) for name in nodes}
    await asyncio.to_thread(cluster.nodes.kill, cluster.nodes.head)
    await asyncio.to_thread(cluster.nodes.start_head)
    began = time.monotonic()

    async def adopted() -> bool:
        return await cluster.starts() == nodes

    await until(adopted, "the next manager has found the workers", PATIENCE_S)
    kept = before == {name: cluster.polls(name) for name in nodes}
    return time.monotonic() - began, kept


async def _noticed(cluster: Cluster, nodes: int) -> float:
    """Seconds from a spot notice until all rollouts of the node wait for the same answer elsewhere."""
    requests = await cluster.begin("noticed", (1 + nodes) * SEATS // 2)
    await cluster.at_work(requests, len(requests))
    leaving = cluster.where(requests[0])
    moved = [one for one in requests if cluster.where(one) == leaving]
    began = time.monotonic()
    await cluster.notice(leaving)
    await cluster.at_work(moved, len(moved), attempt=2)
    seconds = time.monotonic() - began
    cluster.stack.engine.let_go()
    await cluster.end(moved, attempts=2)
    await cluster.end([one for one in requests if one not in moved])
    return seconds


def _table(found: Found, options: argparse.Namespace) -> str:
    ratio = statistics.median(found.ray_rate) / statistics.median(found.plain_rate)
    kept = "the same workers" if found.kept else "**workers were started again**"
    rows = [
        ("a worker by hand polls after its start", _list(found.plain_start_s)),
        (f"a node's worker polls after it joined (aim {JOINED_AIM_S:g})", _list(found.joined_s)),
        ("a worker is back after kill -9", f"{found.killed_s:.1f}"),
        (f"the manager is back after the head's ({kept})", f"{found.head_s:.1f}"),
        ("rollouts are elsewhere after a spot notice", f"{found.noticed_s:.1f}"),
    ]
    return "\n".join(
        [
            f"load of the machine {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores",
            "| seconds until | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            f"rollouts a minute, {SEATS} seats, {options.rollouts} each: by hand "
            f"{_list(found.plain_rate, 0)}, Ray {_list(found.ray_rate, 0)}: {ratio:.2f} x",
            "",
            "| at rest | CPU ms a second | PSS, MB |",
            "|---|---|---|",
            *(f"| {n} | {part.cpu_ms:.1f} | {part.pss_mb:.0f} |" for n, part in found.rest.items()),
        ]
    )


def _list(values: Sequence[float], digits: int = 1) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
