"""`python -m benchmarks.gradings`: gradings per minute on 1 and 2 cores, and what twins cost and prevent.

A process that is limited to these cores (`taskset`) grades a small pytest row in bubblewrap. The core
counts alternate, and so do gradings with and without twins, so that a busy host slows both alike.
`--forgers` also grades correct fixes and forgeries of three real rows with twins. `--gold` grades each
row's own fix many times. `--fixes` counts false alarms over correct fixes of made rows.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.benchmark_options import add_output
from benchmarks.cpu_measurement import Meter
from benchmarks.gradings import false_alarms, forger_results, gold_results
from benchmarks.scratch_folder import scratch_folder

CASES = ("gold", "nop")


@dataclass
class Figures:
    """Wall-clock seconds, CPU seconds and test runs of one combination."""

    seconds: list[float] = field(default_factory=list)
    """Seconds per grading, one value per round."""
    cpu: list[float] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)

    def add(self, seconds: float, cpu: float, runs: float, count: int) -> None:
        self.seconds.append(seconds / count)
        self.cpu.append(cpu / count)
        self.runs.append(runs / count)

    @property
    def a_minute(self) -> float:
        return 60 / statistics.median(self.seconds)


@dataclass
class Side:
    """A grading process that is limited to its cores."""

    process: "subprocess.Popen[bytes]"
    meter: Meter

    @classmethod
    def start(cls, cores: Sequence[int], folder: Path, stack: ExitStack) -> Self:
        meter = stack.enter_context(Meter.open(f"gradings-{len(cores)}", folder))
        only = ["taskset", "--cpu-list", ",".join(map(str, cores))]
        argv = [*only, sys.executable, "-m", "benchmarks.gradings.grading_process"]
        process = meter.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(process.wait)
        assert process.stdin is not None
        stack.callback(process.stdin.close)
        side = cls(process, meter)
        assert side.line() == b"ready\n"
        return side

    def measure(self, figures: Figures, **order: Any) -> None:
        assert self.process.stdin is not None
        before = self.meter.seconds()
        self.process.stdin.write(f"{json.dumps(order)}\n".encode())
        self.process.stdin.flush()
        done = json.loads(self.line())
        cpu = self.meter.seconds() - before
        figures.add(done["seconds"], cpu, done["runs"], order["count"])

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Figures]]:
    """`curve`: cores x gradings at a time. `twins`: case x pairs, one at a time, on all cores."""
    known = sorted(os.sched_getaffinity(0))
    curve: dict[str, Figures] = {}
    twins: dict[str, Figures] = {}
    with ExitStack() as stack:
        sides = {
            count: Side.start(known[:count], folder, stack)
            for count in options.cores
            if count <= len(known)
        }
        for number in range(options.rounds):
            for at_a_time in options.at_a_time:
                for cores, side in _turned(list(sides.items()), number):
                    figures = curve.setdefault(f"{cores} cores, {at_a_time} at a time", Figures())
                    order = {"case": "gold", "pairs": 0, "at_a_time": at_a_time}
                    side.measure(figures, **order, count=max(options.count, 2 * at_a_time))
            for case in CASES:
                for pairs in _turned([0, 1], number):
                    figures = twins.setdefault(f"{case}, {pairs} pairs", Figures())
                    order = {"case": case, "pairs": pairs, "at_a_time": 1}
                    sides[max(sides)].measure(figures, **order, count=options.count)
    return {"curve": curve, "twins": twins}


def _turned(sides: list[Any], number: int) -> list[Any]:
    return sides if number % 2 else sides[::-1]


def report(found: dict[str, dict[str, Figures]], options: argparse.Namespace) -> None:
    cores = sorted({int(key.split()[0]) for key in found["curve"]})
    heads = [f"{n} {'core' if n == 1 else 'cores'}, a minute" for n in cores]
    print(f"| gradings at a time | {' | '.join(heads)} | ratio | CPU s each |")
    print("|---" * (len(cores) + 3) + "|")
    for at_a_time in options.at_a_time:
        row = [found["curve"][f"{n} cores, {at_a_time} at a time"] for n in cores]
        rates = [figures.a_minute for figures in row]
        cpu = statistics.median(row[-1].cpu)
        cells = [str(at_a_time), *(f"{rate:.0f}" for rate in rates)]
        print(f"| {' | '.join(cells)} | {rates[-1] / rates[0]:.2f} | {cpu:.2f} |")
    print("\n| grading | runs | wall s | CPU s | x wall | x CPU |\n|---|---|---|---|---|---|")
    for case in CASES:
        plain, with_twins = (found["twins"][f"{case}, {pairs} pairs"] for pairs in (0, 1))
        print(_cost(f"{case}, official", plain, plain))
        print(_cost(f"{case}, with twins", with_twins, plain))
    load = ", ".join(f"{value:.0f}" for value in os.getloadavg())
    print(f"\nload at the end: {load}; {options.rounds} rounds")


def _cost(name: str, figures: Figures, plain: Figures) -> str:
    wall, cpu = (statistics.median(one) for one in (figures.seconds, figures.cpu))
    runs = statistics.mean(figures.runs)
    ratios = (
        statistics.median(a / b for a, b in zip(*both, strict=True))
        for both in ((figures.seconds, plain.seconds), (figures.cpu, plain.cpu))
    )
    cells = [name, f"{runs:.1f}", f"{wall:.2f}", f"{cpu:.2f}", *(f"{r:.2f}" for r in ratios)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=numbers, default=[1, 2], metavar="1,2")
    parser.add_argument("--at-a-time", type=numbers, default=[1, 2, 4], metavar="1,2,4")
    parser.add_argument("--count", type=int, default=6, help="least gradings per point and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--forgers",
        type=int,
        default=0,
        metavar="TIMES",
        help="grade each forger that wins by chance this often; needs `perdure instances build first-steps`",
    )
    parser.add_argument(
        "--gold",
        type=int,
        default=0,
        metavar="TIMES",
        help="only grade the gold patch of each row of first-steps this often, with twins",
    )
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=[""],
        metavar="NAME,...",
        help="with --gold: only rows whose instance id starts like this",
    )
    parser.add_argument(
        "--fixes",
        type=int,
        default=0,
        metavar="DRAWS",
        help="only grade correct fixes of made rows, each with at most this many draws of twins",
    )
    add_output(parser)
    options = parser.parse_args()
    if options.gold:
        _write(options, gold := asyncio.run(gold_results.measure(options.gold, options.rows)))
        print(f"\n{gold_results.table(gold)}")
        return
    with scratch_folder("pd-", keep=options.keep) as folder:
        if options.fixes:
            results = asyncio.run(false_alarms.measure(options.fixes, folder))
            _write(options, list(map(vars, results)))
            print(f"\n{false_alarms.table(results)}")
            return
        found = measure(options, folder)
    report(found, options)
    lists: dict[str, Any] = {
        key: {name: vars(figures) for name, figures in part.items()} for key, part in found.items()
    }
    if options.forgers:
        forged = asyncio.run(forger_results.measure(options.forgers))
        print(f"\n{forger_results.table(forged)}")
        lists |= vars(forged)
    _write(options, lists)


def _write(options: argparse.Namespace, found: Any) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
