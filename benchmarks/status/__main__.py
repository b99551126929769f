"""`python -m benchmarks.status`: seconds of `perdure status` beside 2,000 open rollouts of 50 open runs.

A real Temporal dev server holds them. Nothing works on the rollouts; a stand-in answers for the runs.
Then its worker stops, and the commands are timed again: nobody answers any run's query.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from benchmarks.status.runs import StandIn
from perdure.client import names, search_attributes
from perdure.stack.plan import temporal_binary
from perdure.types import RolloutRequest

AT_ONCE = 64
LIMIT_S = 60.0
"""A command that takes longer is stopped, and counts as this long."""
IDLE_QUEUE = "nothing-polls-this"
COMMANDS = {"status": [], "status --json": ["--json"], "status RUN": ["crowd-0"]}


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [temporal_binary(), "server", "start-dev", "--headless", "--log-level", "never"]
    command += ["--ip", "127.0.0.1", "--port", str(port)]
    for limit in ("frontend.namespaceRPS=5000", "frontend.namespaceRPS.visibility=200"):
        command += ["--dynamic-config-value", limit]
    for name, kind in names.SEARCH_ATTRIBUTES.items():
        command += ["--search-attribute", f"{name}={kind}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield await _connected(f"127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


async def _connected(address: str) -> Client:
    for _ in range(300):
        try:
            return await Client.connect(address)
        except (RuntimeError, RPCError):
            await asyncio.sleep(0.2)
    raise SystemExit("the Temporal server does not answer")


async def _fill(client: Client, runs: int, rollouts: int) -> None:
    """The first run has three quarters of the rollouts, the others share the rest."""
    room = asyncio.Semaphore(AT_ONCE)

    async def run(number: int) -> None:
        run_id = f"crowd-{number}"
        answer = {
            "run_id": run_id,
            "state": "running",
            "total": 500,
            "running": 100,
            "started": 100,
        }
        found = TypedSearchAttributes([SearchAttributePair(search_attributes.RUN, run_id)])
        async with room:
            await client.start_workflow(
                names.RUN,
                answer,
                id=f"run/{run_id}",
                task_queue=names.WORKFLOWS_QUEUE,
                search_attributes=found,
            )

    async def rollout(number: int) -> None:
        of = 0 if number % 4 else number // 4 % runs
        request = RolloutRequest(
            run_id=f"crowd-{of}", instance=f"toy/i-{number:05}", agent="mini_swe_agent"
        )
        async with room:
            await client.start_workflow(
                names.ROLLOUT,
                request.model_dump(mode="json"),
                id=request.workflow_id,
                task_queue=IDLE_QUEUE,
                search_attributes=search_attributes.of_rollout(request),
            )

    await asyncio.gather(*map(run, range(runs)), *map(rollout, range(rollouts)))


async def _timed(address: str, home: Path, arguments: list[str]) -> float:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "TEMPORAL_"))},
        "TEMPORAL_ADDRESS": address,
        "PERDURE_HOME": str(home),
    }
    command = [sys.executable, "-m", "perdure.cli.main", "status", *arguments]
    since = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        return LIMIT_S
    if process.returncode:
        raise SystemExit(said.decode()[-2000:])
    return time.perf_counter() - since


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    async with _server() as client:
        address = client.service_client.config.target_host
        await _fill(client, options.runs, options.rollouts)
        with tempfile.TemporaryDirectory(prefix="perdure-status-") as folder:

            async def series() -> dict[str, float]:
                found = {}
                for name, arguments in COMMANDS.items():
                    times = [
                        await _timed(address, Path(folder), arguments)
                        for _ in range(options.repeat)
                    ]
                    found[name] = round(statistics.median(times), 2)
                    print(f"{name}: {times}", file=sys.stderr, flush=True)
                return found

            print("the server has all of them", file=sys.stderr, flush=True)
            worker = Worker(
                client,
                task_queue=names.WORKFLOWS_QUEUE,
                workflows=[StandIn],
                workflow_runner=UnsandboxedWorkflowRunner(),
            )
            async with worker:
                answered = await series()
            return {"a worker answers": answered, "no worker": await series()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.status", description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    print(f"median seconds; {options.rollouts} open rollouts, {options.runs} open runs")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
