"""`python -m benchmarks.first_report`: seconds from `git clone` to the first report read.

The newcomer's way, in a scratch folder: clone this checkout, `make setup`, `perdure demo` (nine rollouts of
three agents on three releases from PyPI), `perdure report` of all three runs. The yardstick is `make setup`,
which nothing can do without; uv's cache of this machine is used, and the agents' package is fetched.
"""

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import add_output
from benchmarks.perdure_stack import ROOT
from benchmarks.scratch import scratch_folder

OURS = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_", "VIRTUAL_ENV")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_output(parser)
    options = parser.parse_args(arguments)
    with scratch_folder("perdure-bench-", keep=options.keep) as folder:
        seconds = measure(folder / "clone")
    load = os.getloadavg()[0]
    if options.json:
        document = {"seconds": seconds, "load": load}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print("| step | seconds | x setup |\n|---|---|---|")
    for step, took in seconds.items():
        print(f"| {step} | {took:.1f} | {took / seconds['setup']:.2f} |")
    print(f"\n{os.cpu_count()} cores, load average {load:.1f} at the end")


def measure(clone: Path) -> dict[str, float]:
    seconds: dict[str, float] = {}

    def step(name: str, *command: str | Path, where: Path = clone) -> str:
        began = time.perf_counter()
        env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        done = subprocess.run(
            command, cwd=where, env=env, check=True, capture_output=True, text=True
        )
        seconds[name] = time.perf_counter() - began
        return done.stdout

    step("clone", "git", "clone", "-q", ROOT, clone, where=clone.parent)
    step("setup", "make", "setup")
    perdure = clone / ".venv/bin/perdure"
    runs = set(re.findall(r"/runs/(demo-[\w.-]+)/", step("demo", perdure, "demo", "--json")))
    step("report", perdure, "report", *sorted(runs))
    seconds["all"] = sum(seconds.values())
    return seconds


if __name__ == "__main__":
    main()
