"""`python -m benchmarks.endurance`: 5,500 instances x 3 samples on this machine, a kill -9 every minute.

It uses toy instances, a minimal agent and a scripted model without latency. At the end each rollout
must have one verdict, no sandbox may be left, and repeating the command must do nothing.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common_job
from benchmarks.benchmark_options import add_output
from benchmarks.cpu_measurement import Meter
from benchmarks.endurance import endurance_report
from benchmarks.endurance.endurance_checks import Watch
from benchmarks.kill_schedule import Killer, RunClient
from benchmarks.model_endpoint import Endpoint
from benchmarks.perdure_stack import DATASET, PERDURE, ROOT, Home, Stack
from benchmarks.scratch_folder import scratch_folder

RUN = "endurance"
AGENT = ("--agent", "benchmarks.overhead.bash_agent:BashAgent")
TURNS = 4
POLL_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with (
        scratch_folder("perdure-endurance-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", common_job.script(TURNS)) as endpoint,
    ):
        found = _measure(options, folder, endpoint)
    if options.json:
        options.json.write_text(json.dumps(found.document(), indent=1) + "\n")
    if options.picture:
        endurance_report.draw(found, options.picture)
    print(endurance_report.text(found))
    return 0 if found.right else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance")
    parser.add_argument("--instances", type=int, default=5500)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8, help="rollouts at a time")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="S", help="0: never")
    parser.add_argument("--look-every", type=float, default=20.0, metavar="S")
    parser.add_argument("--limit", type=float, default=6.0, help="time limit in hours")
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills")
    parser.add_argument("--picture", type=Path, metavar="SVG")
    add_output(parser)
    return parser.parse_args(arguments)


def _measure(
    options: argparse.Namespace, folder: Path, endpoint: Endpoint
) -> endurance_report.Outcome:
    home = Home(folder / "home", endpoint.url)
    home.add_instances(common_job.make_tree(folder / "tree"), options.instances)
    words = [*AGENT, "-k", str(options.samples), "-c", str(options.workers), "--run-id", RUN]
    rollouts = options.instances * options.samples
    with Meter.open(RUN, folder / "meter") as meter:
        stack = Stack.start(home, meter)
        try:
            stack.run([*AGENT, "-l", "1", "--run-id", "first"], folder / "run.log")
            endpoint.reset(latency_s=0.0)
            watch = Watch(stack, RUN)
            killer, deaths = _run(options, folder, words, watch)
            stack = killer.stack
            wall_s, cpu_s = time.monotonic() - watch.began, meter.seconds()
            calls = endpoint.calls().total
            began = time.monotonic()
            document = stack.run(words, folder / "run.log")
            return endurance_report.Outcome(
                rollouts=rollouts,
                graded=_graded(document),
                wall_s=wall_s,
                cpu_s=cpu_s,
                client_deaths=deaths,
                calls=calls,
                needed=rollouts * TURNS,
                again_s=time.monotonic() - began,
                again_calls=endpoint.calls().total - calls,
                kills=[(at - watch.began, what) for at, what in killer.done],
                samples=watch.samples,
                ended=watch.ended(),
            )
        finally:
            stack.stop()


def _run(
    options: argparse.Namespace, folder: Path, words: Sequence[str], watch: Watch
) -> tuple[Killer, int]:
    """Run until the client reports the end; return how often the client ended early by itself.

    Raises: RuntimeError at the time limit.
    """
    said = folder / "client.json"

    def start_client() -> "subprocess.Popen[bytes]":
        with (folder / "client.log").open("ab") as log, said.open("wb") as out:
            return watch.stack.meter.popen(
                [*PERDURE, "run", DATASET, *words, "--json"],
                env=watch.stack.home.environment(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )

    deaths = 0
    client = RunClient(start_client, start_client())
    killer = Killer(watch.stack, random.Random(options.seed), client)
    next_kill = watch.began + (options.kill_every or float("inf"))
    next_look = watch.began
    while client.process.poll() is None or not said.stat().st_size:
        now = time.monotonic()
        if client.process.poll() is not None:
            deaths += 1
            client.start_again()
        if now - watch.began > options.limit * 3600:
            raise RuntimeError(f"not done after {options.limit} hours")
        if now >= next_kill:
            killer.kill_one()
            watch.stack = killer.stack
            next_kill = now + options.kill_every
        if now >= next_look:
            sample = watch.look(client.process)
            print(f"{sample.at_s:.0f} s: {sample.done} done", file=sys.stderr, flush=True)
            next_look = now + options.look_every
        time.sleep(POLL_S)
    return killer, deaths


def _graded(document: dict[str, Any]) -> int:
    """The number of rollouts with reward 1. Each counts once."""
    return len(
        {(r["instance_id"], r["sample_index"]) for r in document["rollouts"] if r["reward"] == 1}
    )


if __name__ == "__main__":
    sys.exit(main())
