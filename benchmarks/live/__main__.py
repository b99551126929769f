"""`python -m benchmarks.live`: CPU and memory of each part while N agents wait for a slow model.

Every agent is in its first model call, which is not answered in time. The parts are measured over the
same window at N agents and before the first one, so that what they cost at rest is apart.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import toy
from benchmarks.endpoint import Endpoint
from benchmarks.measuring import Meter
from benchmarks.options import add_output
from benchmarks.perdure_stack import DATASET, PERDURE, ROOT, Home, Stack
from benchmarks.scratch import scratch_folder

AGENT = "benchmarks.overhead.bash_agent:BashAgent"
SLOW_S = 3600.0
"""Seconds of a model call: longer than the benchmark."""
LIMIT_S = 1800.0
"""Seconds until all agents wait; a crowded host needs them."""
SETTLES_S = 10.0
"""Seconds after the last agent came: signals and marks of the boots are over."""


@dataclass(frozen=True)
class Window:
    """CPU milliseconds a second, and resident megabytes, of each part while `agents` waited."""

    agents: int
    cpu: Mapping[str, float]
    memory: Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with (
        scratch_folder("perdure-bench-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", toy.script(1)) as endpoint,
        Meter.open("live", folder / "meter") as meter,
    ):
        windows = _measure(folder, endpoint, meter, options.agents, options.seconds)
    if options.json:
        found = [asdict(window) for window in windows]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(_table(windows))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each window")
    add_output(parser)
    return parser.parse_args(arguments)


def _measure(
    folder: Path, endpoint: Endpoint, meter: Meter, agents: int, seconds: float
) -> list[Window]:
    variables = {
        "PERDURE_SLOTS__AGENT": str(agents),
        "PERDURE_ENGINE__AGENTS": str(agents),
        "PERDURE_ENGINE__HANG_S": str(SLOW_S),
    }
    home = Home(folder / "home", endpoint.url, variables=variables)
    home.add_instances(toy.make_tree(folder / "tree"), agents)
    stack = Stack.start(home, meter)
    try:
        stack.run(["--agent", AGENT, "-l", "1", "--run-id", "first"], folder / "run.log")
        endpoint.reset(latency_s=SLOW_S)
        time.sleep(SETTLES_S)
        rest = _window(stack, 0, seconds)
        with _run(home, agents, folder / "run.log"):
            _until_all_wait(endpoint, agents)
            time.sleep(SETTLES_S)
            busy = _window(stack, agents, seconds)
        endpoint.reset(latency_s=0.0)
        return [rest, busy]
    finally:
        stack.stop()


@contextlib.contextmanager
def _run(home: Home, agents: int, log: Path) -> Iterator[None]:
    """`perdure run` of all agents at once, outside the meter; cancelled at the end."""
    argv = [*PERDURE, "run", DATASET, "--agent", AGENT, "-l", str(agents), "-c", str(agents)]
    argv += ["--run-id", "live", "--set", f"agent_budget_s={SLOW_S:g}", "--json"]
    with log.open("ab") as file:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(argv, env=home.environment(), cwd=ROOT, **options)
        try:
            yield
        finally:
            process.kill()
            process.wait()
            cancel = [*PERDURE, "cancel", "live"]
            subprocess.run(cancel, env=home.environment(), cwd=ROOT, check=False, **options)


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
    return Window(agents, cpu, _memory(stack))


def _memory(stack: Stack) -> dict[str, float]:
    state = stack.state()
    processes = {name: child.pid for name, child in state.children.items()}
    processes["supervisor"] = state.pid
    return {name: _resident_mb(pid) for name, pid in processes.items()}


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _table(windows: Sequence[Window]) -> str:
    rest, busy = windows
    lines = [
        f"| part | CPU ms/s, at rest | {busy.agents} agents wait | ms/s an agent | MB, at rest "
        f"| {busy.agents} agents wait |",
        "|---|---|---|---|---|---|",
    ]
    for name, used in busy.cpu.items():
        each = (used - rest.cpu[name]) / busy.agents
        memory = (
            f"{rest.memory[name]:.0f} | {busy.memory[name]:.0f}" if name in busy.memory else "|"
        )
        lines.append(f"| {name} | {rest.cpu[name]:.0f} | {used:.0f} | {each:.2f} | {memory} |")
    load = os.getloadavg()[0]
    lines.append(f"\nload {load:.0f} on {os.cpu_count()} cores")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
