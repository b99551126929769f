"""`python -m benchmarks.crash`: kills with signal 9 in the middle of a job, restarts as documented,
and counts the calls.

It kills the peer's runner, and every process of Perdure: supervisor, Temporal's server, gateway,
worker, command line. Calls are counted at the endpoint, where they are paid for.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import toy
from benchmarks.crash.sides import Crash, CrashedPeer, CrashedPerdure, Outcome
from benchmarks.endpoint import Endpoint
from benchmarks.options import add_output, words
from benchmarks.overhead.report import machine
from benchmarks.peers.base import Peer
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.harbor import Harbor
from benchmarks.peers.mini_swe_agent import MiniSweAgent
from benchmarks.scratch import scratch_folder

ENVIRONMENTS = Path(".perdure/bench/environments")
AGENTS = {
    "bash": ("--agent", "benchmarks.overhead.bash_agent:BashAgent"),
    "mini": ("--agent", "mini_swe_agent"),
}
PEERS: dict[str, Callable[[Path], Peer]] = {"mini-swe-agent": MiniSweAgent, "harbor": Harbor}
HEAD = (
    "side | finished at the kill | calls | bought again | left behind | back after s | right |"
    " sandboxes lost"
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    crash = Crash(
        rollouts=options.rollouts,
        turns=options.turns,
        latency_s=options.latency,
        workers=options.workers,
        at=options.at,
    )
    outcomes: list[Outcome] = []
    skipped: list[str] = []
    with (
        scratch_folder("perdure-crash-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", toy.script(crash.turns)) as endpoint,
    ):
        for number in range(options.rounds):
            for name in options.agents:
                side = CrashedPerdure(name, AGENTS[name], folder / f"{name}-{number}", endpoint)
                outcomes.append(_told(side.measure(crash)))
            for name in options.peers:
                try:
                    peer = PEERS[name](ENVIRONMENTS.absolute())
                except Unavailable as error:
                    skipped.append(str(error))
                    continue
                peer_side = CrashedPeer(peer, folder / f"{name}-{number}", endpoint)
                outcomes.append(_told(peer_side.measure(crash)))
    if options.json:
        document = {"machine": machine(), "outcomes": [asdict(o) for o in outcomes]}
        options.json.write_text(json.dumps(document | {"skipped": skipped}, indent=1) + "\n")
    print("\n".join([machine(), "", *_table(outcomes), "", *(f"Skipped: {s}" for s in skipped)]))
    ours = [o for o in outcomes if o.side.startswith("Perdure")]
    return 0 if all(o.keeps_its_promise for o in ours) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crash")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of each model call")
    parser.add_argument("--workers", type=int, default=8, help="rollouts at a time")
    parser.add_argument("--at", type=float, default=0.6, help="kill after this share of the calls")
    parser.add_argument("--agents", type=words, default=tuple(AGENTS))
    parser.add_argument("--peers", type=words, default=tuple(PEERS), help="- for none")
    add_output(parser)
    return parser.parse_args(arguments)


def _told(outcome: Outcome) -> Outcome:
    print(outcome, file=sys.stderr, flush=True)
    return outcome


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for o in outcomes:
        again = f"**{o.bought_again:+d} ({100 * o.bought_again / o.ideal_calls:.1f} %)**"
        rows.append(
            f"| {o.side} | {o.finished_at_kill} | {o.calls} | {again} | {o.left_behind} |"
            f" {o.resume_wall:.1f} | {o.right} of {o.rollouts} | {o.attempts_lost} |"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
