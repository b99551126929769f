"""`python -m benchmarks.replay`: sandboxes are killed half way; how much is sampled again?

Each agent runs undisturbed, then with every first sandbox killed by signal 9: once with commands that
always print the same, and once with one that prints the time. Turns that are not replayed are sampled
again; without replay that would be all turns of the lost sandboxes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import toy
from benchmarks.endpoint import Endpoint
from benchmarks.measuring import Meter
from benchmarks.options import add_output, words
from benchmarks.overhead.report import machine
from benchmarks.perdure_stack import Home, Stack
from benchmarks.replay.scripts import HARNESSES, Harness
from benchmarks.replay.sides import Job, Result, measure
from benchmarks.scratch import scratch_folder

HEAD = (
    "agent, commands | sandboxes killed | bought before | not bought again | share | bought in all |"
    " without replay | right | wall, s | replay ended because"
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with scratch_folder("pd-replay-", keep=options.keep) as folder:
        results = list(_measured(options, folder))
    if options.json:
        document = {"machine": machine(), "results": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join([machine(), "", *_table(results)]))
    return 0 if all(r.is_whole for r in results) else 1


def _measured(options: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """One stack for all, so that environment and agents are built before measuring."""
    script = HARNESSES[options.agents[0]].script(options.turns, None)
    with (
        Endpoint.start(folder / "endpoint", script) as endpoint,
        Meter.open("replay", folder / "meter") as meter,
    ):
        home = Home(folder / "home", endpoint.url)
        home.add_instances(toy.make_tree(folder / "tree"), options.rollouts)
        stack = Stack.start(home, meter)
        try:
            for agent in options.agents:
                harness = HARNESSES[agent]
                stack.run(["-a", agent, "-l", "1", "--run-id", f"warm-{agent}"], folder / "log")
                yield from _sides(options, harness, home, stack, endpoint)
        finally:
            stack.stop()


def _sides(
    options: argparse.Namespace, harness: Harness, home: Home, stack: Stack, endpoint: Endpoint
) -> Iterator[Result]:
    kill_at = round(options.at * options.turns)
    sides = (
        ("undisturbed", None, None),
        ("the same output", None, kill_at),
        ("a time in one", options.clock, kill_at),
    )
    for what, clock_at, kill in sides:
        script = harness.script(options.turns, clock_at)
        endpoint.reset(scripts=script, latency_s=options.latency)
        name = f"{harness.agent}, {what}"
        run_id = name.replace(", ", "-").replace(" ", "-").replace("_", "-")
        job = Job(name, run_id, ("-a", harness.agent), options.rollouts, kill)
        result = measure(home, stack, endpoint, job)
        print(result, file=sys.stderr, flush=True)
        yield result


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of each model call")
    parser.add_argument("--at", type=float, default=0.6, help="kill after this share of the turns")
    parser.add_argument(
        "--clock", type=int, default=5, help="the turn that prints the time, from 0"
    )
    parser.add_argument("--agents", type=words, default=tuple(HARNESSES))
    add_output(parser)
    return parser.parse_args(arguments)


def _table(results: Sequence[Result]) -> list[str]:
    rows = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for r in results:
        share = f"{100 * r.share:.1f} %" if r.lost else ""
        ends = "; ".join(f"{why} ({count})" for why, count in r.ends.items())
        rows.append(
            f"| {r.name} | {r.lost} | {r.before_loss} | {r.replayed} | {share} |"
            f" {r.before_loss + r.after_loss} | {r.before_loss + r.episode} |"
            f" {r.right} of {r.rollouts} | {r.wall_s:.1f} | {ends} |"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
