"""`python -m benchmarks.neighbour`: what a hostile rollout costs an innocent one on the same host.

The innocent rollout runs alone, then beside an attack, then alone again, and so on through all attacks
and rounds. A ratio is its seconds beside the attack over the mean of its seconds alone before and
after. The real stack, bubblewrap sandboxes and a scripted engine; the hostile sandbox has half a core.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.endpoint import Endpoint
from benchmarks.neighbour import innocent
from benchmarks.neighbour.arena import Arena, Innocent, Spoiled
from benchmarks.neighbour.attacks import ATTACKS
from benchmarks.options import add_output, words
from benchmarks.overhead.report import machine
from benchmarks.perdure_stack import ROOT
from benchmarks.scratch import scratch_folder

HONEST = ("idle", "cpu")
"""No attacks: the noise of the comparison, and the use of a CPU share that was granted."""
HEAD = "beside | pairs | alone s | beside s | ratio | lowest to highest | right | load"


@dataclass(frozen=True)
class Pair:
    """One innocent rollout beside an attack, and its neighbours in time that ran alone."""

    attack: str
    alone: tuple[Innocent, ...]
    beside: Innocent
    load: float
    spoiled: str = ""

    @property
    def ratio(self) -> float:
        return self.beside.seconds / self.alone_s

    @property
    def alone_s(self) -> float:
        return mean(one.seconds for one in self.alone)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if unknown := set(options.attacks) - set(ATTACKS):
        raise SystemExit(f"unknown attacks {sorted(unknown)}: use {', '.join(ATTACKS)}")
    with (
        scratch_folder("pd-nb-", keep=options.keep) as folder,
        Endpoint.start(folder / "endpoint", innocent.script()) as endpoint,
    ):
        endpoint.reset(latency_s=options.latency)
        pairs = asyncio.run(_measured(options, folder, endpoint))
    if options.json:
        document = {"machine": machine(), "commit": _commit(), "pairs": [asdict(p) for p in pairs]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join([f"{machine()}, commit {_commit()}", "", *_table(options.attacks, pairs)]))
    return (
        0
        if all(_median(pairs, a) <= options.aim for a in options.attacks if a not in HONEST)
        else 1
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbour", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attacks", type=words, default=tuple(ATTACKS))
    parser.add_argument("--latency", type=float, default=0.3, help="seconds of each model call")
    parser.add_argument("--aim", type=float, default=1.2, help="exit 1 above this median ratio")
    add_output(parser)
    return parser.parse_args(arguments)


async def _measured(options: argparse.Namespace, folder: Path, endpoint: Endpoint) -> list[Pair]:
    """A new stack where an attack has spoiled the old one."""
    todo = [attack for _ in range(options.rounds) for attack in options.attacks]
    done: list[Pair] = []
    stacks = 0
    while len(done) < len(todo):
        stacks += 1
        with contextlib.suppress(Spoiled):
            async with Arena.open(folder / f"stack-{stacks}", endpoint) as arena:
                await _through(arena, todo, done)
    return done


async def _through(arena: Arena, todo: list[str], done: list[Pair]) -> None:
    """Add pairs until all are done. Raises: Spoiled after adding the pair that ruined the stack."""
    before = await arena.innocent()
    while len(done) < len(todo):
        attack = todo[len(done)]
        beside: Innocent | None = None
        try:
            async with arena.beside(attack):
                beside = await arena.innocent()
        except Spoiled as error:
            if beside is None:
                raise RuntimeError(f"{attack}: {error}") from error
            done.append(_told(Pair(attack, (before,), beside, os.getloadavg()[0], str(error))))
            raise
        after = await arena.innocent()
        done.append(_told(Pair(attack, (before, after), beside, os.getloadavg()[0])))
        before = after


def _told(pair: Pair) -> Pair:
    print(
        f"{pair.attack:<14} alone {pair.alone_s:6.2f} beside {pair.beside.seconds:6.2f}"
        f" ratio {pair.ratio:5.2f} right {pair.beside.right} load {pair.load:.1f} {pair.spoiled}",
        file=sys.stderr,
        flush=True,
    )
    return pair


def _table(attacks: Sequence[str], pairs: Sequence[Pair]) -> list[str]:
    rows = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for attack in attacks:
        found = [pair for pair in pairs if pair.attack == attack]
        ratios = sorted(pair.ratio for pair in found)
        over = "" if all(pair.beside.in_time for pair in found) else "> "
        rows.append(
            f"| {attack} | {len(found)} | {median(p.alone_s for p in found):.1f} |"
            f" {over}{median(p.beside.seconds for p in found):.1f} | **{over}{median(ratios):.2f}** |"
            f" {ratios[0]:.2f} to {ratios[-1]:.2f} |"
            f" {sum(p.beside.right for p in found)} of {len(found)} |"
            f" {median(p.load for p in found):.1f} |"
        )
    return rows


def _median(pairs: Sequence[Pair], attack: str) -> float:
    return median(pair.ratio for pair in pairs if pair.attack == attack)


def _commit() -> str:
    """What was measured; `+` if the working tree differs."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
