"""`python -m benchmarks.throughput`: unmodified mini-swe-agents that wait for a model, on three runners.

Each batch holds several times as many rollouts as run at once, so that the steady state shows separately
from the first burst. The sides alternate for each size. `--slurm 1,2,4` compares
Perdure with itself on 1, 2 and 4 nodes instead.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import common_job
from benchmarks.benchmark_options import add_output, words
from benchmarks.model_endpoint import Endpoint
from benchmarks.peers.harbor import HarborMini
from benchmarks.peers.mini_swe_agent import MiniSweAgent
from benchmarks.peers.peer_environments import Unavailable
from benchmarks.scratch_folder import scratch_folder
from benchmarks.throughput.slurm_nodes import SlurmFigures
from benchmarks.throughput.slurm_nodes import measure as measure_on_slurm
from benchmarks.throughput.throughput_runners import Batch, Figures, PeerSide, PerdureSide, Side

CACHE = Path(".perdure/bench/environments")
SIDES = ("perdure", "harbor", "mini-swe-agent")
HEAD = (
    "| side | agents | right | steady, rollouts/min (x ideal) | burst s (x ideal) | added to a call,"
    " p50 / p95 ms | cores an agent | idle CPU | memory MB | whole batch s |"
)


SLURM_HEAD = "| nodes | seats | right | rollouts/min | of the first row's | x ideal | idle CPU |"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    return _on_slurm(options) if options.slurm else _next_to_peers(options)


def _next_to_peers(options: argparse.Namespace) -> int:
    batches = [
        Batch(agents, agents * options.times, options.turns, options.latency)
        for agents in options.agents
    ]
    found: list[Figures] = []
    with (
        scratch_folder("perdure-bench-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", common_job.script(options.turns)) as endpoint,
    ):
        sides = _sides(options.sides, folder, endpoint)
        _print_head(HEAD)
        for batch in batches:
            for side in sides:
                found.append(side.measure(batch))
                print(_row(found[-1], batch), flush=True)
    return _end(found, options)


def _on_slurm(options: argparse.Namespace) -> int:
    found: list[SlurmFigures] = []
    with scratch_folder("perdure-bench-", keep=options.keep) as folder:
        _print_head(SLURM_HEAD)
        for nodes in options.slurm:
            place = folder / f"at-{nodes}"
            one = measure_on_slurm(place, nodes, options.times, options.turns, options.latency)
            found.append(one)
            ideal = 60 * one.seats / (options.turns * options.latency)
            cells = (
                str(nodes),
                str(one.seats),
                f"{one.right} of {one.rollouts}",
                f"{one.per_minute:.1f}",
                f"{one.per_minute / found[0].per_minute:.2f}",
                f"{one.per_minute / ideal:.2f}",
                f"{one.idle:.0%}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)
    return _end(found, options)


def _print_head(head: str) -> None:
    print("\n".join((head, "|" + "---|" * (head.count("|") - 1))), flush=True)


def _end(found: Sequence[Figures | SlurmFigures], options: argparse.Namespace) -> int:
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return int(any(one.right < one.rollouts for one in found))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput")
    parser.add_argument("--agents", type=_numbers, default=(16, 64, 256), metavar="16,64,256")
    parser.add_argument("--times", type=int, default=4, help="rollouts = agents x times, 3 or more")
    parser.add_argument("--turns", type=int, default=20, help="model calls per rollout")
    parser.add_argument("--latency", type=float, default=2.0, help="seconds per model call")
    parser.add_argument(
        "--sides", type=words, default=SIDES, help=f"comma-separated, from {', '.join(SIDES)}"
    )
    parser.add_argument(
        "--slurm",
        type=_numbers,
        default=(),
        metavar="1,2,4",
        help="numbers of nodes of a Slurm cluster on this machine; no other sides",
    )
    add_output(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.sides) - set(SIDES):
        parser.error(f"--sides: {', '.join(sorted(unknown))} is not one of {', '.join(SIDES)}")
    if options.times < 3:
        parser.error("--times: 3 or more; fewer have no steady state")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _sides(names: Sequence[str], folder: Path, endpoint: Endpoint) -> list[Side]:
    sides: list[Side] = []
    for name in names:
        try:
            sides.append(_side(name, folder / name, endpoint))
        except Unavailable as error:
            print(f"skipped: {error}", file=sys.stderr)
    return sides


def _side(name: str, folder: Path, endpoint: Endpoint) -> Side:
    """Raises: Unavailable."""
    root = CACHE.absolute()
    if name == "perdure":
        return PerdureSide(folder, endpoint)
    if name == "harbor":
        pattern = "jobs/bench/*/agent/mini-swe-agent.trajectory.json"
        return PeerSide(HarborMini(root), pattern, folder, endpoint)
    return PeerSide(MiniSweAgent(root), "out/*/*.traj.json", folder, endpoint)


def _row(found: Figures, batch: Batch) -> str:
    ideal_s = batch.turns * batch.latency_s
    cells = (
        found.side,
        str(found.agents),
        f"{found.right} of {found.rollouts}",
        f"{found.steady:.1f} ({found.steady / batch.ideal:.3f})",
        f"{found.burst_s:.1f} ({found.burst_s / ideal_s:.2f})",
        f"{found.added_p50_ms:.1f} / {found.added_p95_ms:.1f}",
        f"{found.cores_per_agent:.4f}",
        f"{found.idle:.0%}",
        f"{found.memory_mb:.0f}",
        f"{found.wall_s:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
