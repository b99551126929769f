"""`python -m benchmarks.s3`: requests and bytes that a rollout costs in S3, and their price.

The laptop stack over an S3 server in memory runs small runs and a larger one; what differs between them
is the cost of a rollout, and what both have is the cost of a run. With `--prices` of the reader's own
provider it also says what a thousand rollouts cost.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import toy
from benchmarks.endpoint import Endpoint
from benchmarks.measuring import Meter
from benchmarks.options import add_output
from benchmarks.perdure_stack import Home, Stack, right_answers
from benchmarks.scratch import scratch_folder

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}
WRITES, READS = ("PUT", "LIST"), ("GET", "HEAD")
"""As S3 prices them; a DELETE costs nothing."""
SHOWN = 12
"""Kinds of requests in the table; the rest is one line."""


@dataclass(frozen=True)
class Asked:
    """Requests, and bytes of their bodies, by method and kind of object."""

    requests: Counter[str]
    moved: Counter[str]

    def __sub__(self, before: "Asked") -> "Asked":
        return Asked(self.requests - before.requests, self.moved - before.moved)

    def of(self, methods: Sequence[str]) -> int:
        return sum(n for what, n in self.requests.items() if what.split()[0] in methods)


@dataclass(frozen=True)
class Measured:
    rollouts: int
    asked: Asked
    """By the runs, without the start of the stack."""
    held: int
    objects: int
    """Bytes and objects that stay."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    os.environ.update(CREDENTIALS)
    with (
        scratch_folder("perdure-s3-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", toy.script(options.turns)) as endpoint,
        _server(options.latency) as server,
    ):
        small, large = _measure(options, folder, endpoint, server)
    one = _each(small, large)
    if options.json:
        options.json.write_text(json.dumps(one, indent=1) + "\n")
    print(_table(one, options))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3")
    parser.add_argument("--rollouts", type=int, default=100, help="of the larger run")
    parser.add_argument("--workers", type=int, default=8, help="rollouts at a time")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--model-s", type=float, default=0.5, help="seconds of each model call")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds of each S3 request")
    parser.add_argument(
        "--prices",
        type=_prices,
        metavar="WRITES,READS,GB",
        help="of 1,000 writes and lists, of 1,000 reads, of a GB for a month",
    )
    add_output(parser)
    return parser.parse_args(arguments)


def _prices(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if len(found) != 3:
        raise argparse.ArgumentTypeError("give three numbers, such as 0.005,0.0004,0.023")
    return found


@contextlib.contextmanager
def _server(latency_s: float) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "benchmarks.memory_s3", "--latency", str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def _measure(
    options: argparse.Namespace, folder: Path, endpoint: Endpoint, server: str
) -> tuple[Measured, Measured]:
    home = Home(folder / "home", endpoint.url, store="s3://bench/store", s3=server)
    few, many = max(1, options.rollouts // 4), options.rollouts
    home.add_instances(toy.make_tree(folder / "tree"), many)
    with Meter.open("perdure-s3", folder / "meter") as meter:
        stack = Stack.start(home, meter)
        try:
            bench = Bench(stack, endpoint, server, options)
            bench.run("first", 1)
            return bench.run("small", few), bench.run("large", many)
        finally:
            stack.stop()


@dataclass(frozen=True)
class Bench:
    stack: Stack
    endpoint: Endpoint
    server: str
    options: argparse.Namespace

    def run(self, name: str, count: int) -> Measured:
        """Raises: RuntimeError if a rollout is not right."""
        self.endpoint.reset(latency_s=self.options.model_s)
        before, held = _asked(self.server), _get(self.server, "counts")
        agent = ("--agent", "benchmarks.overhead.bash_agent:BashAgent")
        words = [*agent, "-l", str(count), "-c", str(self.options.workers), "--run-id", name]
        document = self.stack.run(words, self.stack.home.folder / "run.log")
        if right_answers(document) != count:
            raise RuntimeError(f"{right_answers(document)} of {count} rollouts of {name} are right")
        after = _get(self.server, "counts")
        return Measured(
            count,
            _asked(self.server) - before,
            after["held"] - held["held"],
            after["objects"] - held["objects"],
        )


def _get(server: str, what: str) -> Mapping[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{server}/-/{what}", timeout=10) as answer:
        found: Mapping[str, Any] = json.load(answer)
    return found


def _asked(server: str) -> Asked:
    names = _get(server, "names")
    return Asked(
        Counter({what: n for what, (n, _) in names.items()}),
        Counter({what: size for what, (_, size) in names.items()}),
    )


def _each(small: Measured, large: Measured) -> dict[str, Any]:
    """What one rollout more costs."""
    more = large.rollouts - small.rollouts

    def rate(big: float, little: float) -> float:
        return (big - little) / more

    kinds = {
        what: {
            "requests": rate(n, small.asked.requests[what]),
            "bytes": rate(large.asked.moved[what], small.asked.moved[what]),
        }
        for what, n in large.asked.requests.items()
    }
    return {
        "writes": rate(large.asked.of(WRITES), small.asked.of(WRITES)),
        "reads": rate(large.asked.of(READS), small.asked.of(READS)),
        "deletes": rate(large.asked.of(("DELETE",)), small.asked.of(("DELETE",))),
        "objects": rate(large.objects, small.objects),
        "held": rate(large.held, small.held),
        "kinds": kinds,
    }


def _table(one: Mapping[str, Any], options: argparse.Namespace) -> str:
    kinds = sorted(one["kinds"].items(), key=lambda item: -item[1]["requests"])
    shown = [(what, each["requests"], each["bytes"]) for what, each in kinds[:SHOWN]]
    rest = [each for _, each in kinds[SHOWN:]]
    if rest:
        total = (sum(each["requests"] for each in rest), sum(each["bytes"] for each in rest))
        shown.append((f"{len(rest)} other kinds", *total))
    lines = ["| request | a rollout | KB |", "|---|---|---|"]
    lines += [f"| {what} | {n:.2f} | {size / 1000:.2f} |" for what, n, size in shown]
    lines.append(
        f"\nA rollout of {options.turns} turns: {one['writes']:.1f} writes and lists, {one['reads']:.1f} reads, "
        f"{one['deletes']:.1f} deletes; {one['objects']:.1f} objects of {one['held'] / 1000:.0f} KB stay."
    )
    if options.prices:
        write, read, month = options.prices
        requests = one["writes"] * write + one["reads"] * read
        lines.append(
            f"1,000 rollouts: {requests:.2f} for requests, {one['held'] * 1e-6 * month:.4f} a month for storage."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
