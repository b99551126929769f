"""`python -m benchmarks.flaky`: the same rollouts on an E2B that fails 0, 5 and 20 % of all calls.

The real SDK calls the double of `tests.doubles`. Rollouts are the oracle's, each with a sandbox for
the agent and one for the grader. Shares take turns within a round. The double counts sandboxes. A call
that meets a fault is refused, answered late, or executed with its answer lost.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import toy
from benchmarks.measuring import Meter
from benchmarks.options import add_output
from benchmarks.overhead.report import machine
from benchmarks.perdure_stack import Home, Stack, right_answers
from benchmarks.scratch import scratch_folder
from perdure.stack import ports, readiness

EVERY_CALL, COMMAND, UPLOAD = ".", "POST /process.Process/Start", "POST /files"
MENU: tuple[dict[str, Any], ...] = (
    {"match": EVERY_CALL, "status": 401},
    {"match": EVERY_CALL, "status": 408},
    {"match": EVERY_CALL, "status": 429, "headers": {"Retry-After": "1"}},
    {"match": EVERY_CALL, "status": 500},
    {"match": EVERY_CALL, "status": 500, "body": "<html>oops</html>"},
    {"match": EVERY_CALL, "status": 502},
    {"match": EVERY_CALL, "status": 502, "when": "after"},
    {"match": EVERY_CALL, "status": 503},
    {"match": EVERY_CALL, "status": 504, "when": "after"},
    {"match": EVERY_CALL, "reset": True},
    {"match": EVERY_CALL, "reset": True, "when": "after"},
    {"match": EVERY_CALL, "delay_s": 2.0},
)
"""Each fault gets an equal part of the share."""
LIES: tuple[dict[str, Any], ...] = (
    *({"match": COMMAND, "stream": how} for how in ("cut", "no_end", "empty_end", "truncated")),
    {"match": COMMAND, "twice": True},
    {"match": UPLOAD, "upload": "missing"},
    {"match": UPLOAD, "upload": "short"},
)
"""Additional faults, each for a twentieth of the share: wrong answers to calls that succeed."""


@dataclass(frozen=True)
class Slice:
    share: float
    rollouts: int
    right: int
    seconds: float
    calls: int
    faults: int
    sandboxes: int
    left: int


class Service:
    """The double in its own process, and its counts."""

    def __init__(self, state: Path, port: int) -> None:
        self.state, self.url = state, f"http://127.0.0.1:{port}"

    def variables(self) -> dict[str, str]:
        key = "e2b_" + "0" * 40
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": key}

    def break_share(self, share: float) -> None:
        rules = [{**rule, "probability": share / 20} for rule in LIES]
        for number, rule in enumerate(MENU):  # only the first fault that a call meets counts
            part = share / len(MENU)
            rules.append({**rule, "probability": part / (1 - number * part)})
        self._call("DELETE", "rules")
        self._call("POST", "rules", [{**rule, "times": None} for rule in rules])

    def counts(self) -> tuple[int, int]:
        """Calls so far, and those that met a fault, since `break_share`."""
        return len(self._call("GET", "log")), sum(r["hits"] for r in self._call("GET", "rules"))

    def made(self) -> int:
        """Sandboxes that it has created since its first start."""
        return len(list((self.state / "keys").glob("*.json")))

    def living(self) -> int:
        return len(self._call("GET", "sandboxes"))

    def _call(self, method: str, name: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/__control/{name}", data, method=method)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


@contextlib.contextmanager
def service(folder: Path, seed: int) -> Iterator[Service]:
    found = Service(folder, ports.free_port())
    argv = [sys.executable, "-m", "tests.doubles.e2b_server", "--state", str(folder)]
    process = subprocess.Popen(
        [*argv, "--port", found.url.rpartition(":")[2], "--seed", str(seed)],
        stdout=subprocess.DEVNULL,
    )
    try:
        asyncio.run(readiness.wait_for_http(f"{found.url}/__control/rules"))
        yield found
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class BrokenHome(Home):
    """A home whose workers use the double instead of E2B."""

    service: Service = field(kw_only=True)

    def environment(self) -> dict[str, str]:
        return super().environment() | self.service.variables()


def measure(stack: Stack, double: Service, share: float, count: int, options: Any) -> Slice:
    double.break_share(share)
    made, run_id = double.made(), f"share-{share:g}-{time.time_ns()}"
    started = time.monotonic()
    document = stack.run(
        [
            *("--agent", "oracle", "--sandbox", "e2b", "-l", str(count)),
            *("--concurrency", str(options.concurrency), "--run-id", run_id),
        ],
        stack.home.folder / "run.log",
    )
    seconds = time.monotonic() - started
    calls, faults = double.counts()
    found = Slice(
        share,
        count,
        right_answers(document),
        seconds,
        calls,
        faults,
        sandboxes=double.made() - made,
        left=double.living(),
    )
    print(found, file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    count = options.rollouts // options.rounds
    slices: list[Slice] = []
    with (
        scratch_folder("perdure-flaky-", keep=options.keep) as folder,
        service(folder / "service", options.seed) as double,
        Meter.open("flaky", folder / "meter") as meter,
    ):
        home = BrokenHome(folder / "home", engine_url="http://127.0.0.1:9", service=double)
        home.add_instances(toy.make_tree(folder / "tree"), count)
        stack = Stack.start(home, meter)
        try:
            measure(stack, double, 0.0, min(4, count), options)  # caches, imports
            for _ in range(options.rounds):
                slices += [measure(stack, double, s, count, options) for s in options.shares]
        finally:
            stack.stop()
    if options.json:
        options.json.write_text(json.dumps([asdict(found) for found in slices], indent=1) + "\n")
    print("\n".join([machine(), "", *_table(slices, options.shares)]))
    return 0 if all(found.right == found.rollouts and not found.left for found in slices) else 1


def _table(slices: Sequence[Slice], shares: Sequence[float]) -> list[str]:
    lines = [
        "calls that fail | rollouts | completed | seconds | ratio | calls | met a fault |"
        " sandboxes more than two each | left",
        "---|---|---|---|---|---|---|---|---",
    ]
    base = sum(found.seconds for found in slices if found.share == shares[0])
    for share in shares:
        own = [found for found in slices if found.share == share]
        rollouts, right = sum(f.rollouts for f in own), sum(f.right for f in own)
        seconds, calls = sum(f.seconds for f in own), sum(f.calls for f in own)
        faults, boxes = sum(f.faults for f in own), sum(f.sandboxes for f in own)
        lines.append(
            f"{share:.0%} | {rollouts} | {right / rollouts:.1%} | {seconds:.0f} |"
            f" {seconds / base:.2f} | {calls} | {faults} ({faults / calls:.1%}) |"
            f" {boxes - 2 * rollouts} | {sum(f.left for f in own)}"
        )
    return lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flaky")
    parser.add_argument("--rollouts", type=int, default=100, help="rollouts at each share")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds in which the shares take turns"
    )
    parser.add_argument("--shares", type=_shares, default=(0.0, 0.05, 0.2))
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    add_output(parser)
    return parser.parse_args(arguments)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
