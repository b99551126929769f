"""`python -m benchmarks.startup`: CPU seconds of the commands that people call all day.

A stack runs in a scratch home and has finished one rollout. Each round calls every command once, so
that other load on the machine affects all of them alike. It also starts a bare Python and makes the
two imports that `status` needs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import toy
from benchmarks.measuring import Meter
from benchmarks.options import add_output
from benchmarks.perdure_stack import DATASET, PERDURE, ROOT, Home, Stack
from benchmarks.scratch import scratch_folder

RUN = "startup"
BARE = "python -c pass"
IMPORTS = "python -c 'import temporalio.client, pydantic'"
LIMITS = {"--help": 0.3, "show": 0.8, "status": 0.8}
"""The aim in CPU seconds, by command."""


@dataclass(frozen=True)
class Row:
    """CPU seconds of one command line, one number per round."""

    name: str
    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with (
        scratch_folder("perdure-bench-", keep=options.keep) as folder,
        Meter.open("startup", folder / "meter") as meter,
    ):
        home = Home(folder / "home", engine_url="")
        home.add_instances(toy.make_tree(folder / "tree"), 1)
        stack = Stack.start(home, meter)
        try:
            stack.run(["--agent", "oracle", "--run-id", RUN], folder / "run.log")
            rows = _measure(home.environment(), folder, options.rounds)
        finally:
            stack.stop()
    if options.json:
        document = {row.name: list(row.seconds) for row in rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(_table(rows))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup")
    parser.add_argument("--rounds", type=int, default=7)
    add_output(parser)
    return parser.parse_args(arguments)


def _commands() -> dict[str, list[str]]:
    """Command lines by their name in the table."""
    perdure = {
        "--help": ["--help"],
        "run --help": ["run", "--help"],
        "settings": ["settings"],
        "show": ["show", f"{RUN}/{toy.instance_ids(1)[0]}"],
        "status": ["status"],
        "status RUN": ["status", RUN],
        "instances list": ["instances", "list", DATASET],
    }
    return {
        BARE: [sys.executable, "-c", "pass"],
        IMPORTS: [sys.executable, "-c", "import temporalio.client, pydantic"],
        **{name: [*PERDURE, *words] for name, words in perdure.items()},
    }


def _measure(environment: Mapping[str, str], folder: Path, rounds: int) -> list[Row]:
    commands = _commands()
    found: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, argv in commands.items():
            seconds = _cpu_seconds(argv, environment, folder / "commands.log")
            if number:  # the first round writes bytecode and fills the page cache
                found[name].append(seconds)
    return [Row(name, seconds) for name, seconds in found.items()]


def _cpu_seconds(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> float:
    """User plus system time of one process and its threads. Raises: RuntimeError if it fails."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            argv, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{argv} failed: {log.read_text()[-2000:]}")
    return used.ru_utime + used.ru_stime


def _table(rows: Sequence[Row]) -> str:
    of = {row.name: row.median for row in rows}
    lines = [
        f"| command | CPU s, min | median | aim | x `{BARE}` | x `{IMPORTS}` |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row.name if row.name in (BARE, IMPORTS) else f"perdure {row.name}"
        aim = f"{LIMITS[row.name]:g}" if row.name in LIMITS else ""
        ratios = f"{row.median / of[BARE]:.0f} | {row.median / of[IMPORTS]:.2f}"
        lines.append(f"| `{name}` | {min(row.seconds):.2f} | {row.median:.2f} | {aim} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
