"""`python -m benchmarks.crash`: kills processes during a job, restarts it as documented, counts verdicts
and calls.

It sends SIGKILL to the engine, then to agents' sandboxes, then to the peer's runner or to every process
of Perdure: supervisor, Temporal's server, gateway, worker, command line. Calls are counted at the
endpoint, where they are paid for. The promise: only turns in flight at the kills are bought again.

A peer's killed sandbox answers later commands as a killed container does in the peer's own Docker
environment: with exit code 1 (Harbor, mini-swe-agent) or SandboxUnavailableError (Inspect).
The scripted answers solve the task, so each result that says otherwise is wrong. By default the
sandboxes die in the last turns of the first rollouts, which end before everything is killed: a restart
would hide what became of them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import common_job
from benchmarks.benchmark_options import add_output, words
from benchmarks.crash.crash_outcome import Crash, Outcome
from benchmarks.crash.crash_runners import CrashedPeer, CrashedPerdure
from benchmarks.model_endpoint import Endpoint
from benchmarks.overhead.overhead_report import machine
from benchmarks.peers.base import Peer
from benchmarks.peers.harbor import Harbor
from benchmarks.peers.inspect_ai import InspectAi
from benchmarks.peers.mini_swe_agent import MiniSweAgent
from benchmarks.peers.peer_environments import Unavailable
from benchmarks.scratch_folder import scratch_folder

ENVIRONMENTS = Path(".perdure/bench/environments")
AGENTS = {
    "bash": ("--agent", "benchmarks.overhead.bash_agent:BashAgent"),
    "mini": ("--agent", "mini_swe_agent"),
}
PEERS: dict[str, Callable[[Path], Peer]] = {
    "inspect": InspectAi,
    "mini-swe-agent": MiniSweAgent,
    "harbor": Harbor,
}
HEAD = (
    "side | right | wrong zeros | without a verdict | finished at the kill | calls | bought again |"
    " turns in flight at the kills | at most those | left behind | back after s | CPU s | sandboxes lost"
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    crash = Crash(
        rollouts=options.rollouts,
        turns=options.turns,
        latency_s=options.latency,
        workers=options.workers,
        sandboxes=options.sandboxes,
        engine_at=options.at[0],
        sandboxes_at=options.at[1],
        everything_at=options.at[2],
    )
    outcomes: list[Outcome] = []
    skipped: list[str] = []
    with (
        scratch_folder("perdure-crash-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", common_job.script(crash.turns)) as endpoint,
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
    return 0 if all(o.meets_guarantees for o in ours) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crash")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds per model call")
    parser.add_argument("--workers", type=int, default=8, help="rollouts at a time")
    parser.add_argument("--sandboxes", type=int, default=4, help="agents' sandboxes to kill")
    parser.add_argument(
        "--at",
        type=float,
        nargs=3,
        default=(0.2, 0.4, 0.6),
        metavar=("ENGINE", "SANDBOXES", "EVERYTHING"),
        help="kill after these shares of the calls",
    )
    parser.add_argument("--agents", type=words, default=tuple(AGENTS))
    parser.add_argument(
        "--peers", type=words, default=tuple(PEERS), help="comma-separated; - for none"
    )
    add_output(parser)
    return parser.parse_args(arguments)


def _told(outcome: Outcome) -> Outcome:
    print(outcome, file=sys.stderr, flush=True)
    return outcome


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for o in outcomes:
        flight = ", ".join(f"{what} {count}" for what, count in o.in_flight.items())
        kept = "yes" if o.repeated_calls <= o.max_repeated_calls else "**no**"
        lost = f"{o.attempts_lost} of {o.sandboxes_killed} killed"
        rows.append(
            f"| {o.side} | {o.right} of {o.rollouts} | {o.zeros} | {o.unscored} |"
            f" {o.finished_at_kill} | {o.calls} | **{o.repeated_calls}** |"
            f" {o.max_repeated_calls} ({flight}) | {kept} | {o.left_behind} |"
            f" {o.resume_wall:.1f} | {o.cpu:.0f} | {lost} |"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
