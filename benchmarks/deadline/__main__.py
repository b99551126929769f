"""`python -m benchmarks.deadline`: does a run end at its deadline while its processes are killed?

Each seed is one run with more rollouts than fit. Until the deadline, SIGKILL hits a worker, the
gateway, a sandbox, Temporal's server, or all of them, every few seconds. The run must end within a
minute of its deadline, and its manifest must name each rollout without a verdict, with stage and
cause. Then the same command with a later deadline must finish the run, from the recorded turns.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from temporalio.client import Client

from benchmarks import common_job
from benchmarks.benchmark_options import add_output
from benchmarks.cpu_measurement import Meter
from benchmarks.kill_schedule import Killer
from benchmarks.model_endpoint import Endpoint
from benchmarks.overhead.overhead_report import machine
from benchmarks.perdure_stack import Home, Stack, right_answers
from benchmarks.scratch_folder import scratch_folder
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.storage import store_keys

AGENT = ("--agent", "benchmarks.overhead.bash_agent:BashAgent")
TURNS = 10
AT_A_TIME = 4
LATEST_S = 60.0
"""Maximum seconds from a run's deadline to its end."""
LIMIT_S = 300.0
"""Seconds after the deadline until the benchmark gives up on a run."""
LATER = "10m"
POLL_S = 0.5
HEAD = (
    "seed | kills | ended s after the deadline | verdicts | named | unnamed | bought again | left"
)


@dataclass(frozen=True)
class Ending:
    """How one run ended."""

    seed: int
    kills: Sequence[str]
    late_s: float
    """Seconds from the deadline to the end of the run; negative if it ended earlier."""
    verdicts: int
    named: int
    """Rollouts without a verdict that the manifest names with a cause: unfinished or failed."""
    unnamed: int
    """Rollouts with neither a verdict nor a name."""
    right: int
    """Rollouts with reward 1 at the end."""
    bought_again: int
    """Model calls beyond those that the rollouts need."""
    left: int
    """Living sandboxes at the end."""

    @property
    def is_kept(self) -> bool:
        return self.late_s <= LATEST_S and not self.unnamed and not self.left


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with (
        scratch_folder("perdure-deadline-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", common_job.script(TURNS)) as endpoint,
    ):
        endings = _measure(options, folder, endpoint)
    if options.json:
        document = {"machine": machine(), "runs": [asdict(one) for one in endings]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join([machine(), "", *_table(endings)]))
    whole = all(one.is_kept and one.right == options.rollouts for one in endings)
    return 0 if whole else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deadline")
    parser.add_argument("--seeds", type=_range, default=range(1, 21), metavar="1-20")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="S")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--latency", type=float, default=1.5, help="seconds per model call")
    parser.add_argument("--kill-every", type=float, default=8.0, metavar="S", help="mean; 0: never")
    add_output(parser)
    return parser.parse_args(arguments)


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _measure(options: argparse.Namespace, folder: Path, endpoint: Endpoint) -> list[Ending]:
    home = Home(folder / "home", endpoint.url)
    home.add_instances(common_job.make_tree(folder / "tree"), options.rollouts)
    endings = []
    with Meter.open("deadline", folder / "meter") as meter:
        stack = Stack.start(home, meter)
        try:
            stack.run([*AGENT, "-l", "1", "--run-id", "first"], folder / "run.log")
            for seed in options.seeds:
                killer = Killer(stack, random.Random(seed))
                endings.append(_one(options, folder, endpoint, killer, seed))
                stack = killer.stack
                print(endings[-1], file=sys.stderr, flush=True)
        finally:
            stack.stop()
    return endings


def _one(
    options: argparse.Namespace, folder: Path, endpoint: Endpoint, killer: Killer, seed: int
) -> Ending:
    endpoint.reset(latency_s=options.latency)
    run_id, log = f"seed-{seed}", folder / "run.log"
    words = [*AGENT, "-c", str(AT_A_TIME), "--run-id", run_id]
    killer.stack.run([*words, "--deadline", f"{options.deadline:g}s", "--detach"], log)
    ends_at = time.time() + options.deadline
    next_kill = time.time() + _pause(killer.rng, options.kill_every)
    while time.time() < ends_at:
        if time.time() >= next_kill:
            killer.kill_one()
            next_kill = time.time() + _pause(killer.rng, options.kill_every)
        time.sleep(POLL_S)
    began_s, ended_s = asyncio.run(_times(killer.stack, run_id, ends_at + LIMIT_S))
    manifest = json.loads(_manifest(killer.stack.home, run_id).read_text())
    (folder / f"{run_id}.json").write_text(json.dumps(manifest))
    calls = len(endpoint.bought())
    endpoint.reset(latency_s=0.0)
    named = [row for row in manifest["unfinished"] if row["cause"]]
    named += [one for one in manifest["episodes"] if one["status"] == "failed" and one["failure"]]
    document = killer.stack.run([*words, "--deadline", LATER], log)
    return Ending(
        seed=seed,
        kills=[what for _, what in killer.done],
        late_s=ended_s - began_s - options.deadline,
        verdicts=manifest["graded"],
        named=len(named),
        unnamed=options.rollouts - manifest["graded"] - len(named),
        right=right_answers(document),
        bought_again=calls + len(endpoint.bought()) - options.rollouts * TURNS,
        left=_living(killer.stack.home),
    )


def _pause(rng: random.Random, mean_s: float) -> float:
    return rng.uniform(0.5, 1.5) * mean_s if mean_s else float("inf")


async def _times(stack: Stack, run_id: str, until: float) -> tuple[float, float]:
    """When the run began and ended (Unix seconds). Raises: RuntimeError if it is open at `until`."""
    state = stack.state()
    client = await Client.connect(state.temporal_address, namespace=state.namespace)
    while time.time() < until:
        found = await client.get_workflow_handle(f"run/{run_id}").describe()
        if found.close_time is not None:
            return found.start_time.timestamp(), found.close_time.timestamp()
        await asyncio.sleep(POLL_S)
    raise RuntimeError(f"{run_id} is still open {LIMIT_S:g} s after its deadline")


def _manifest(home: Home, run_id: str) -> Path:
    return home.folder / "store" / store_keys.manifest(run_id)


def _living(home: Home) -> int:
    return sum(SandboxFolder(path).alive for path in home.folder.glob("sandboxes/*/p-*"))


def _table(endings: Sequence[Ending]) -> list[str]:
    rows = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for one in endings:
        rows.append(
            f"| {one.seed} | {', '.join(one.kills)} | {one.late_s:+.1f} | {one.verdicts} |"
            f" {one.named} | {one.unnamed} | {one.bought_again} | {one.left} |"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
