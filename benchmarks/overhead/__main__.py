"""`python -m benchmarks.overhead`: runs the common job on Perdure and its peers, in several rounds.

The sides alternate within each round, in a rotating order, so that other load on the machine affects all
of them alike. The report has medians over the rounds.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import common_job
from benchmarks.benchmark_options import add_output, words
from benchmarks.model_endpoint import Endpoint
from benchmarks.overhead import overhead_report
from benchmarks.overhead.overhead_runners import PeerSide, PerdureSide, Sample, Side, Size
from benchmarks.peers.base import Peer
from benchmarks.peers.harbor import Harbor, HarborInside
from benchmarks.peers.mini_swe_agent import MiniSweAgent
from benchmarks.peers.peer_environments import Unavailable
from benchmarks.scratch_folder import scratch_folder

TURNS = 4
CACHE = Path(".perdure/bench")
PERDURE_AGENTS = {
    "bash": ("--agent", "benchmarks.overhead.bash_agent:BashAgent"),
    "direct": ("--agent", "mini_swe_agent", "--set", "agent_options.client=direct"),
    "mini": ("--agent", "mini_swe_agent"),
}
TWINS = {"unittest, 1 run": 0, "unittest, twins": 1}
PEERS: dict[str, Callable[[Path], Peer]] = {
    "mini-swe-agent": MiniSweAgent,
    "harbor": Harbor,
    "harbor-inside": HarborInside,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    skipped: list[str] = []
    samples: list[Sample] = []
    with (
        scratch_folder("perdure-bench-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", common_job.script(TURNS)) as endpoint,
    ):
        sides = _sides(options, folder, endpoint, skipped)
        for size in _plan(options):
            for number in range(options.rounds):
                turn = number % len(sides)
                for side in [*sides[turn:], *sides[:turn]]:
                    if size.rollouts > side.largest or (size.rollouts == 1 and side.is_service):
                        continue
                    sample = side.measure(size)
                    samples.append(sample)
                    print(overhead_report.line(sample), file=sys.stderr, flush=True)
    found = overhead_report.Report(samples, skipped)
    if options.json:
        options.json.write_text(json.dumps(found.document(), indent=1) + "\n")
    print(found.text())
    return 0 if all(s.right == s.rollouts for s in samples) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=_numbers, default=(1, 50, 200), metavar="1,50,200")
    parser.add_argument("--workers", type=int, default=8, help="rollouts at a time")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds per model call")
    parser.add_argument(
        "--agents",
        type=words,
        default=("bash", "mini"),
        help=f"comma-separated, from {', '.join(PERDURE_AGENTS)}",
    )
    parser.add_argument(
        "--peers",
        type=words,
        default=tuple(PEERS),
        help=f"comma-separated, from {', '.join(PEERS)}; - for none",
    )
    parser.add_argument(
        "--twins",
        action="store_true",
        help="also run a unittest row, graded without twins and with them",
    )
    parser.add_argument(
        "--largest-mini", type=int, default=50, help="most rollouts with mini in sandboxes"
    )
    add_output(parser)
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _plan(options: argparse.Namespace) -> list[Size]:
    return [Size(n, options.workers, options.latency) for n in options.sizes]


def _sides(
    options: argparse.Namespace, folder: Path, endpoint: Endpoint, skipped: list[str]
) -> list[Side]:
    sides: list[Side] = []
    for name in options.agents:
        largest = sys.maxsize if name == "bash" else options.largest_mini
        home = folder / f"perdure-{name}"
        side = PerdureSide(name, PERDURE_AGENTS[name], home, endpoint, largest=largest)
        side.warm_up(max(options.sizes))
        sides.append(side)
    for name, pairs in TWINS.items() if options.twins else ():
        arguments = (*PERDURE_AGENTS["bash"], "--set", f"twin_pairs={pairs}")
        side = PerdureSide(name, arguments, folder / f"twins-{pairs}", endpoint, with_twins=True)
        side.warm_up(max(options.sizes))
        sides.append(side)
    for name in options.peers:
        try:
            peer = PEERS[name](CACHE.absolute() / "environments")
        except Unavailable as error:
            skipped.append(str(error))
            print(f"skipped: {error}", file=sys.stderr)
            continue
        side_of_peer = PeerSide(peer, folder / name, endpoint)
        side_of_peer.warm_up()
        sides.append(side_of_peer)
    return sides


if __name__ == "__main__":
    sys.exit(main())
