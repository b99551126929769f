"""`python -m benchmarks.live`: CPU and memory of each part while N agents wait for a slow model.

Every agent is in its first model call, which the model does not answer during the measurement. Each part
is measured over the same time with N agents and before the first one, so that its cost at rest shows
separately. Then all calls are answered at once, so that all agents end together.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from temporalio.client import Client

from benchmarks import common_job
from benchmarks.benchmark_options import add_output
from benchmarks.cpu_measurement import Memory, Meter
from benchmarks.model_endpoint import Endpoint
from benchmarks.perdure_stack import DATASET, PERDURE, ROOT, Home, Stack
from benchmarks.scratch_folder import scratch_folder
from perdure.client import search_attribute_keys
from perdure.storage import store_keys

AGENT = "benchmarks.overhead.bash_agent:BashAgent"
RUN = "live"
SLOW_S = 3600.0
"""Seconds of a model call, longer than the benchmark."""
LIMIT_S = 1800.0
"""Timeout until all agents wait, in seconds; a crowded host needs it."""
SETTLES_S = 10.0
"""Seconds after the last agent has started, until the work of the boots is over."""


@dataclass(frozen=True)
class Window:
    """CPU milliseconds a second, and memory, of each part while `agents` waited."""

    agents: int
    cpu: Mapping[str, float]
    memory: Mapping[str, Memory]


@dataclass(frozen=True)
class Burst:
    """The results of `agents` whose first calls were answered at the same moment.

    `first`, `last`: seconds until the first and the last episode. `pause`: the longest time between two.
    """

    agents: int
    right: int
    first: float
    last: float
    pause: float
    again: int
    """Activities that were retried."""
    late: int
    """Lines in Temporal's log about a missed deadline."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with (
        scratch_folder("perdure-bench-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", common_job.script(1)) as endpoint,
        Meter.open("live", folder / "meter") as meter,
    ):
        windows, burst = _measure(folder, endpoint, meter, options.agents, options.seconds)
    if options.json:
        found = {"windows": [asdict(window) for window in windows], "burst": asdict(burst)}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(_table(windows))
    print(_ended(burst))
    return int(burst.right < burst.agents)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds per measurement")
    add_output(parser)
    return parser.parse_args(arguments)


def _measure(
    folder: Path, endpoint: Endpoint, meter: Meter, agents: int, seconds: float
) -> tuple[list[Window], Burst]:
    variables = {
        "PERDURE_SLOTS__AGENT": str(agents),
        "PERDURE_ENGINE__AGENTS": str(agents),
        "PERDURE_ENGINE__HANG_S": str(SLOW_S),
    }
    home = Home(folder / "home", endpoint.url, variables=variables)
    home.add_instances(common_job.make_tree(folder / "tree"), agents)
    stack = Stack.start(home, meter)
    try:
        stack.run(["--agent", AGENT, "-l", "1", "--run-id", "first"], folder / "run.log")
        endpoint.reset(latency_s=SLOW_S)
        time.sleep(SETTLES_S)
        rest = _window(stack, 0, seconds)
        with _run(home, agents, folder / "run.log") as run:
            _until_all_wait(endpoint, agents)
            time.sleep(SETTLES_S)
            busy = _window(stack, agents, seconds)
            late = _missed_deadlines(home)
            released = time.time()
            endpoint.reset(latency_s=0.0)
            run.wait(timeout=LIMIT_S)
        burst = _burst(home, agents, released)
        again = asyncio.run(_tried_again(stack))
        return [rest, busy], replace(burst, again=again, late=_missed_deadlines(home) - late)
    finally:
        stack.stop()


@contextlib.contextmanager
def _run(home: Home, agents: int, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs `perdure run` for all agents at once, outside the meter. Cancels it if it does not end."""
    argv = [*PERDURE, "run", DATASET, "--agent", AGENT, "-l", str(agents), "-c", str(agents)]
    argv += ["--run-id", RUN, "--set", f"agent_budget_s={SLOW_S:g}", "--json"]
    with log.open("ab") as file:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(argv, env=home.environment(), cwd=ROOT, **options)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
                cancel = [*PERDURE, "cancel", RUN]
                subprocess.run(cancel, env=home.environment(), cwd=ROOT, check=False, **options)


def _burst(home: Home, agents: int, released: float) -> Burst:
    written = (home.folder / "store" / store_keys.rollouts(RUN)).rglob("episode.json")
    rollouts = [json.loads(path.read_bytes()) for path in written]
    ends = sorted(one["finished_at"] - released for one in rollouts)
    pauses = [after - before for before, after in itertools.pairwise([0.0, *ends])]
    right = sum(one["reward"] == 1 for one in rollouts)
    return Burst(agents, right, ends[0], ends[-1], max(pauses), 0, 0)


async def _tried_again(stack: Stack) -> int:
    state = stack.state()
    client = await Client.connect(state.temporal_address, namespace=state.namespace)
    count = 0
    async for one in client.list_workflows(f"{search_attribute_keys.RUN.name} = '{RUN}'"):
        history = await client.get_workflow_handle(one.id, run_id=one.run_id).fetch_history()
        started = [event.activity_task_started_event_attributes for event in history.events]
        count += sum(each.attempt > 1 for each in started)
    return count


def _missed_deadlines(home: Home) -> int:
    return (home.folder / "logs" / "temporal.log").read_bytes().count(b"deadline exceeded")


def _until_all_wait(endpoint: Endpoint, agents: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while endpoint.calls().most_in_flight < agents:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{agents} agents did not all call the model")
        time.sleep(1.0)


def _window(stack: Stack, agents: int, seconds: float) -> Window:
    before, began = stack.split(), time.monotonic()
    time.sleep(seconds)
    after, took = stack.split(), time.monotonic() - began
    cpu = {name: (after[name] - before[name]) / took * 1000 for name in after}
    memory = {name: Memory.of([pid]) for name, pid in stack.pids().items()}
    return Window(agents, cpu, memory)


def _table(windows: Sequence[Window]) -> str:
    rest, busy = windows
    lines = [
        f"| part | CPU ms/s, at rest | {busy.agents} agents wait | ms/s an agent | PSS MB, at rest "
        f"| {busy.agents} agents wait |",
        "|---|---|---|---|---|---|",
    ]
    for name, used in busy.cpu.items():
        each = (used - rest.cpu[name]) / busy.agents
        memory = (
            f"{rest.memory[name].pss:.0f} | {busy.memory[name].pss:.0f}"
            if name in busy.memory
            else "|"
        )
        lines.append(f"| {name} | {rest.cpu[name]:.0f} | {used:.0f} | {each:.2f} | {memory} |")
    load = os.getloadavg()[0]
    lines.append(f"\nload {load:.0f} on {os.cpu_count()} cores")
    return "\n".join(lines)


def _ended(burst: Burst) -> str:
    return (
        f"\nAll calls answered at once: {burst.right} of {burst.agents} right, the first episode after "
        f"{burst.first:.1f} s, the last after {burst.last:.1f} s; the longest time without one "
        f"{burst.pause:.1f} s. {burst.again} activities were tried again. Temporal missed {burst.late} deadlines."
    )


if __name__ == "__main__":
    sys.exit(main())
