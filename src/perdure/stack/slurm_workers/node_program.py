"""`python -m perdure.stack.slurm_workers.node_program`: one task of the job array. It runs the node's
worker and leaves the node when Slurm wants it back.

SIGUSR1: the time limit is near, so the task requeues itself. SIGTERM: Slurm ends the task (requeue,
preemption, scancel). Both are spot notices: the rollouts of this node move at once.
"""

import argparse
import asyncio
import contextlib
import getpass
import math
import os
import signal
import sys
from pathlib import Path
from time import monotonic

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client.bottlenecks import backlogs
from perdure.client.temporal_client import connect
from perdure.durable_files import write_file
from perdure.errors import ConfigurationError, PerdureError
from perdure.settings import process_environment
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack.node_worker import NodeWorker
from perdure.stack.slurm_workers import slurm_commands
from perdure.telemetry import configure_logging

REPORT_S = 2.0
"""Seconds between two reports to the shared folder."""
COUNT_S = 15.0
"""Seconds between two checks of the array's size. Each sends Slurm's controller one request."""
PAUSE_S = 5.0
"""Seconds between two requests to a controller that does not answer."""

log = structlog.get_logger("perdure.slurm_workers")


def wanted_nodes(least: int, most: int, running: int, waiting: int, seats: int) -> int:
    """How many tasks Slurm may run. `waiting`: boots and gradings that no worker has taken.
    `seats`: the seats of one node."""
    return min(most, max(least, running + math.ceil(waiting / seats)))


class NodeProgram:
    def __init__(self, options: argparse.Namespace, settings: Settings, node: str) -> None:
        self._least, self._most, self._idle_s = options.min, options.max, options.idle_s
        self._array = int(process_environment.foreign("SLURM_ARRAY_JOB_ID"))
        self._task = int(process_environment.foreign("SLURM_ARRAY_TASK_ID"))
        self._job = process_environment.foreign("SLURM_JOB_ID")
        self._report = Path(f"node-{self._job}.json").absolute()
        self._seats = settings.slots.agent
        self._settings = settings
        self._client: Client | None = None
        self._throttle = 0
        self._ended, self._noticed = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ended.set)
        loop.add_signal_handler(signal.SIGUSR1, self._noticed.set)
        self._worker = NodeWorker(node, settings)

    async def run(self) -> None:
        idle = asyncio.create_task(self._watch_until_idle())
        waits = [asyncio.create_task(one.wait()) for one in (self._ended, self._noticed)]
        await asyncio.wait([idle, *waits], return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if idle.done():
            idle.result()
        else:
            idle.cancel()
            log.info(
                "Slurm takes this node back; its rollouts move to other nodes",
                notice=self._noticed.is_set(),
            )
            await self._worker.leave()
        self._report.unlink(missing_ok=True)
        await self._requeue()

    async def _requeue(self) -> None:
        """Return the task to the queue, unless Slurm has ended it."""
        while not self._ended.is_set():
            try:
                return await asyncio.to_thread(slurm_commands.requeue, self._job)
            except PerdureError as error:
                log.warning("cannot requeue this task; retrying", reason=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._ended.wait()

    async def _watch_until_idle(self) -> None:
        """Report the worker's state. Return once the node has been idle and was given back."""
        busy_at, counted_at, reported = monotonic(), float("-inf"), None
        while True:
            report = self._worker.report()
            if report.taken:
                busy_at = monotonic()
            try:
                if report != reported:
                    await asyncio.to_thread(write_file, self._report, report.model_dump_json())
                    reported = report
                if self._least < self._most and monotonic() - counted_at > COUNT_S:
                    counted_at = monotonic()
                    if await self._scale(monotonic() - busy_at):
                        return
            except (PerdureError, RPCError, OSError) as error:
                log.warning("cannot report or scale now", reason=str(error))
            await asyncio.sleep(REPORT_S)

    async def _scale(self, idle_s: float) -> bool:
        """Return whether this node was given back. The first `least` running tasks keep their
        nodes, and the first one sets how many tasks Slurm may run."""
        running = await asyncio.to_thread(slurm_commands.running, self._array)
        if self._task not in running:  # Slurm is ending it
            return False
        place = running.index(self._task)
        if place == 0:
            self._client = self._client or await connect(settings=self._settings)
            counted = await backlogs(self._client)
            waiting = sum(one.count for one in counted if one.stage in ("boot", "grade"))
            wanted = wanted_nodes(self._least, self._most, len(running), waiting, self._seats)
            if wanted != self._throttle:
                await asyncio.to_thread(slurm_commands.throttle, self._array, wanted)
                self._throttle = wanted
                log.info("set the number of nodes", nodes=wanted, waiting=waiting)
        elif place >= self._least and idle_s > self._idle_s and await self._worker.give_back():
            with contextlib.suppress(PerdureError):  # otherwise a spare task would start at once
                fewer = max(self._least, len(running) - 1)
                await asyncio.to_thread(slurm_commands.throttle, self._array, fewer)
            return True
        return False


async def run_node(options: argparse.Namespace) -> None:
    node = process_environment.foreign("SLURMD_NODENAME")
    cpus = int(process_environment.foreign("SLURM_CPUS_ON_NODE"))
    seats = math.floor(cpus / options.cpus_per_rollout + 1e-9)
    if not seats:
        raise ConfigurationError(
            f"no seat: {node} has {cpus} CPUs; lower --cpus-per-rollout {options.cpus_per_rollout:g}"
        )
    home = options.home.replace("{node}", node).replace("{user}", getpass.getuser())
    process_environment.force({"PERDURE_HOME": home, "PERDURE_SLOTS__AGENT": str(seats)})
    await NodeProgram(options, load_settings(), node).run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--cpus-per-rollout", type=float, required=True)
    parser.add_argument("--min", type=int, required=True)
    parser.add_argument("--max", type=int, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    options = parser.parse_args()
    configure_logging("slurm-node")
    code = 0
    try:
        asyncio.run(run_node(options))
    except PerdureError as error:
        log.error("cannot run this node's worker", reason=str(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the SDK's native threads can crash the interpreter during its teardown


if __name__ == "__main__":
    main()
