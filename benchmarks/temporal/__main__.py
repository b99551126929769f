"""`python -m benchmarks.temporal`: the capacity of one Temporal dev server, and a rollout's load on any.

It runs the real workflows on the server that `perdure up` starts, with its flags and its database in a
file. The activities do nothing, so there is no sandbox, model or store. There is one run for each number
of concurrent rollouts, in turn, for several rounds.

Actions are counted from the histories as https://docs.temporal.io/cloud/actions describes them. Heartbeats
are actions too, but no history shows them, so they are counted as they are sent; short stages send none.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from benchmarks.benchmark_options import add_output
from benchmarks.cpu_measurement import Meter
from benchmarks.perdure_stack import ROOT
from benchmarks.scratch_folder import scratch_folder
from benchmarks.temporal.empty_activities import QUEUES, HeartbeatCounting, Stages
from perdure.client import temporal_names
from perdure.settings.settings_tree import Settings
from perdure.stack import temporal_setup
from perdure.stack.stack_plan import Addresses, Plan
from perdure.stack.stack_ports import free_port
from perdure.types import RunRequest
from workers.workflow_worker import workflow_worker

ACTIONS = (
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED,
    EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED,
    EventType.EVENT_TYPE_TIMER_STARTED,
    EventType.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED,
    EventType.EVENT_TYPE_MARKER_RECORDED,
)
START_S = 120.0
SETTLES_S = 5.0
"""The server needs a moment to close a run."""


@dataclass(frozen=True)
class Asked:
    """Counts per rollout."""

    actions: float
    events: float
    history_bytes: float


@dataclass(frozen=True)
class Measured:
    at_once: int
    per_s: float
    server_ms: float
    """CPU of the server per rollout."""
    worker_ms: float
    """CPU of this process, the worker for workflows and for activities that do nothing."""
    disk_bytes: float
    heartbeats: float
    """Per rollout."""
    rollout: Asked
    run: Asked
    """A rollout's share of the run's own workflows."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.temporal")
    parser.add_argument("--rollouts", type=int, default=400, help="rollouts per run")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--agent-minutes", type=float, default=0.0, help="how long an agent takes")
    add_output(parser)
    options = parser.parse_args(arguments)
    with scratch_folder("perdure-temporal-", keep=options.keep) as folder:
        found = asyncio.run(_measure(options, folder))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(_table(found))
    return 0


async def _measure(options: argparse.Namespace, folder: Path) -> list[Measured]:
    with Meter.open("temporal", folder / "meter") as meter:
        async with _server(meter, folder) as client, AsyncExitStack() as workers:
            stages = Stages(options.rollouts, 60 * options.agent_minutes)
            counting = HeartbeatCounting()
            await workers.enter_async_context(workflow_worker(client))
            for queue in QUEUES:
                worker = Worker(
                    client,
                    task_queue=queue,
                    activities=stages.activities(),
                    interceptors=[counting],
                )
                await workers.enter_async_context(worker)
            bench = Bench(client, meter, folder, options.rollouts, counting)
            await bench.run("first", 8)
            return [
                await bench.run(f"{at_once}-at-once-{round_}", at_once)
                for round_ in range(options.rounds)
                for at_once in options.at_once
            ]


@asynccontextmanager
async def _server(meter: Meter, folder: Path) -> AsyncIterator[Client]:
    ports = (free_port(), free_port())
    address = f"127.0.0.1:{ports[0]}"
    settings = Settings(home=folder)
    addresses = Addresses(address, *ports, gateway_port=0, engine_port=0)
    spec = Plan(settings, ROOT, addresses).temporal()
    with (folder / "server.log").open("wb") as log:
        process = meter.popen(spec.argv, env={**os.environ, **spec.env}, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(START_S):
            client = await temporal_setup.wait_for_temporal(address, settings)
        yield client
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Bench:
    client: Client
    meter: Meter
    folder: Path
    rollouts: int
    counting: HeartbeatCounting

    async def run(self, name: str, at_once: int) -> Measured:
        """Raises: RuntimeError if a rollout is not graded."""
        request = RunRequest(run_id=name, dataset="toy", concurrency=at_once)
        disk, cpu, own, started = self._disk(), self.meter.seconds(), time.process_time(), _now()
        beats = self.counting.count
        result = await self.client.execute_workflow(
            temporal_names.RUN,
            request,
            id=f"run/{name}",
            task_queue=temporal_names.WORKFLOWS_QUEUE,
        )
        took, own = _now() - started, time.process_time() - own
        await asyncio.sleep(SETTLES_S)
        server = self.meter.seconds() - cpu
        if result["by_status"] != {"graded": self.rollouts}:
            raise RuntimeError(f"{name}: {result}")
        ids = [f"rollout/{name}/add-{number:05d}/0" for number in range(0, self.rollouts, 20)]
        rollouts = [await _asked(self.client.get_workflow_handle(id)) for id in ids]
        parents = [
            await _asked(self.client.get_workflow_handle(one.id, run_id=one.run_id))
            async for one in self.client.list_workflows(f"PerdureRun = '{name}'")
            if one.workflow_type in (temporal_names.RUN, temporal_names.SHARD)
        ]
        return Measured(
            at_once,
            self.rollouts / took,
            1e3 * server / self.rollouts,
            1e3 * own / self.rollouts,
            (self._disk() - disk) / self.rollouts,
            (self.counting.count - beats) / self.rollouts,
            _each(rollouts, len(rollouts)),
            _each(parents, self.rollouts),
        )

    def _disk(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("temporal.db*"))


def _now() -> float:
    return time.monotonic()


async def _asked(handle: WorkflowHandle[Any, Any]) -> Asked:
    described = await handle.describe()
    history = await handle.fetch_history()
    kinds = Counter(event.event_type for event in history.events)
    size = described.raw_description.workflow_execution_info.history_size_bytes
    return Asked(sum(kinds[kind] for kind in ACTIONS), len(history.events), size)


def _each(asked: Sequence[Asked], rollouts: int) -> Asked:
    def of(field: str) -> float:
        return float(sum(getattr(one, field) for one in asked)) / rollouts

    return Asked(of("actions"), of("events"), of("history_bytes"))


def _table(found: Sequence[Measured]) -> str:
    sizes = sorted({one.at_once for one in found})
    lines = ["| at a time | rollouts a second | server, CPU ms | worker, CPU ms | KB on disk |"]
    lines.append("|---|---|---|---|---|")
    for size in sizes:
        rows = [one for one in found if one.at_once == size]
        rate, server, worker, disk = (
            statistics.median(getattr(one, field) for one in rows)
            for field in ("per_s", "server_ms", "worker_ms", "disk_bytes")
        )
        lines.append(f"| {size} | {rate:.1f} | {server:.0f} | {worker:.0f} | {disk / 1e3:.0f} |")
    one = found[0]
    lines.append(
        f"\nA rollout: {one.rollout.actions:.1f} actions and {one.heartbeats:.1f} heartbeats, {one.rollout.events:.0f} events, "
        f"{one.rollout.history_bytes / 1e3:.1f} KB of history; with its share of the run's own workflows "
        f"{one.rollout.actions + one.run.actions:.1f}, {one.rollout.events + one.run.events:.0f} and "
        f"{(one.rollout.history_bytes + one.run.history_bytes) / 1e3:.1f} KB."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
