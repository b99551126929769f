"""`python -m benchmarks.start`: seconds and CPU seconds of `perdure up`, and memory, part by part.

Each round starts a stack in the same scratch home and stops it. Its unit is measured beside it: one
Python that makes the two imports which every part of Perdure makes. Then one more stack grades
rollouts, and its memory is looked at before, after, and once it has been idle.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import toy
from benchmarks.endpoint import Endpoint
from benchmarks.measuring import Memory, Meter
from benchmarks.options import add_output
from benchmarks.perdure_stack import Home, Stack
from benchmarks.scratch import scratch_folder

UNIT = "import temporalio.client, pydantic"
AIM_S, AIM_CPU_S, AIM_MB = 3.0, 4.0, 500
AGENT = "benchmarks.overhead.bash_agent:BashAgent"
TURNS, AT_ONCE = 4, 8


@dataclass(frozen=True)
class Start:
    """One start. `parts`: CPU seconds of each process; `unit`: those of the two imports."""

    seconds: float
    cpu: float
    parts: dict[str, float]
    unit: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with scratch_folder("perdure-bench-", keep=options.keep) as folder:
        home = Home(folder / "home", engine_url="")
        starts = [_start(home, folder / f"meter-{n}") for n in range(options.rounds + 1)]
        looks = _held(folder / "held", options.rollouts, options.idle)
    warm = starts[1:]  # the first one writes bytecode and Temporal's database
    if options.json:
        found = {"starts": [asdict(one) for one in warm], "memory": looks}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(_table(warm))
    print(_memory_table(looks))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rollouts", type=int, default=240, help="before the second look at memory"
    )
    parser.add_argument("--idle", type=float, default=240.0, help="seconds before the third look")
    add_output(parser)
    return parser.parse_args(arguments)


def _start(home: Home, folder: Path) -> Start:
    unit = _cpu_of_unit()
    with Meter.open("start", folder) as meter:
        began = time.monotonic()
        stack = Stack.start(home, meter)
        try:
            seconds, cpu, parts = time.monotonic() - began, meter.seconds(), stack.split()
        finally:
            stack.stop()
    return Start(seconds, cpu, parts, unit)


def _held(folder: Path, rollouts: int, idle_s: float) -> dict[str, dict[str, Memory]]:
    """The memory of one stack: started, after its rollouts, idle."""
    with (
        Endpoint.start(folder / "endpoint", toy.script(TURNS)) as endpoint,
        Meter.open("held", folder / "meter") as meter,
    ):
        home = Home(folder / "home", endpoint.url)
        home.add_instances(toy.make_tree(folder / "tree"), rollouts)
        stack = Stack.start(home, meter)
        try:
            looks = {"started": stack.memory()}
            asked = ["--agent", AGENT, "-l", str(rollouts), "-c", str(AT_ONCE)]
            stack.run([*asked, "--run-id", "held"], folder / "run.log")
            looks[f"{rollouts} rollouts"] = stack.memory()
            time.sleep(idle_s)
            return looks | {f"idle for {idle_s:.0f} s": stack.memory()}
        finally:
            stack.stop()


def _cpu_of_unit() -> float:
    process = subprocess.Popen([sys.executable, "-c", UNIT])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{UNIT!r} failed")
    return used.ru_utime + used.ru_stime


def _table(starts: Sequence[Start]) -> str:
    unit = statistics.median(one.unit for one in starts)
    lines = [f"| part | CPU s, min | median | x `{UNIT}` |", "|---|---|---|---|"]
    for name in starts[0].parts:
        label = "the rest, short-lived" if name == "sandboxes" else name
        lines.append(_row(label, [one.parts[name] for one in starts], unit))
    lines.append(_row(f"all (aim {AIM_CPU_S:g})", [one.cpu for one in starts], unit))
    walls = [one.seconds for one in starts]
    load = os.getloadavg()[0]
    lines.append(
        f"\nuntil it is ready: {min(walls):.1f} s at least, median {statistics.median(walls):.1f} "
        f"(aim {AIM_S:g}); load {load:.0f} on {os.cpu_count()} cores"
    )
    return "\n".join(lines)


def _memory_table(looks: Mapping[str, Mapping[str, Memory]]) -> str:
    """PSS, and RSS in brackets."""
    lines = [f"\n| MB: PSS (RSS) | {' | '.join(looks)} |", "|---" * (len(looks) + 1) + "|"]
    for name in next(iter(looks.values())):
        lines.append(_memory_row(name, [look[name] for look in looks.values()]))
    sums = [Memory(*map(sum, zip(*look.values(), strict=True))) for look in looks.values()]
    return "\n".join([*lines, _memory_row(f"all (aim {AIM_MB})", sums)])


def _memory_row(name: str, values: Sequence[Memory]) -> str:
    return f"| {name} | " + " | ".join(f"{one.pss:.0f} ({one.rss:.0f})" for one in values) + " |"


def _row(name: str, values: Sequence[float], unit: float) -> str:
    median = statistics.median(values)
    return f"| {name} | {min(values):.2f} | {median:.2f} | {median / unit:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
