"""`python -m benchmarks.trainer_rollouts`: Perdure beside SkyRL's own rollout code, under SkyRL's own
trainer and scheduler.

Both sides take the same agent turns from one scripted engine, whose calls take the same uneven times in the
same order. It prints what each side adds between two calls of a session, the share of sampled tokens that
reach the loss, and how long the engine has nothing to do. The trainer's environment is that of
`make test-trainers`.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import common_job
from benchmarks.benchmark_options import add_output
from benchmarks.call_log import CallLog
from benchmarks.cpu_measurement import Meter
from benchmarks.learn import toy_vocabulary
from benchmarks.perdure_stack import Home, Stack
from benchmarks.scratch_folder import scratch_folder
from benchmarks.trainer_rollouts.paced_engine import EngineTimes, PacedEngine, paces, times
from tests.real import trainers_here

SIDES = ("skyrl", "perdure")
PROGRAM = Path(__file__).with_name("skyrl_training.py")
HEAD = (
    "| side | right | trained / sampled tokens | between calls, p50 / p95 ms | engine idle |"
    " calls at once | s |"
)


@dataclass(frozen=True)
class Figures:
    side: str
    rollouts: int
    right: float
    """Rollouts that the hidden test resolved."""
    trained: int
    """Tokens that the loss takes."""
    sampled: int
    """Tokens that the engine sampled."""
    times: EngineTimes


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    trainers_here.install()
    found: list[Figures] = []
    print(HEAD)
    print("|---" * HEAD.count(" | ") + "|---|", flush=True)
    with scratch_folder("perdure-bench-", keep=options.keep) as folder:
        for number in range(options.rounds):
            for side in SIDES:
                place = folder / f"{number}-{side}"
                found.append(asyncio.run(_measure(side, place, options, seed=number)))
                print(_row(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    wanted = options.steps * options.groups * options.samples
    return 0 if all(one.right == wanted for one in found) else 1


async def _measure(side: str, folder: Path, options: argparse.Namespace, seed: int) -> Figures:
    folder.mkdir(parents=True)
    vocabulary = folder / "tokenizer"
    toy_vocabulary.write(vocabulary)
    engine = PacedEngine(common_job.script(options.turns), tokenizer=str(vocabulary))
    engine.ledger = CallLog(folder / "calls.tsv")
    engine.paces = paces(options.latency, seed)
    asked = {
        "side": side,
        "run_id": f"{side}-{seed}",
        "tokenizer": str(vocabulary),
        **{name: getattr(options, name) for name in ("steps", "groups", "samples", "turns")},
        "step_s": options.step,
    }
    async with engine:
        asked["url"] = engine.url
        said = json.dumps(asked)
        if side == "skyrl":
            done = await trainers_here.run(str(PROGRAM), said)
        else:
            done = await _on_perdure(folder, vocabulary, engine, said, options)
        stats = engine.stats()
        return Figures(
            side=side,
            rollouts=done["rollouts"],
            right=done["right"],
            trained=done["trained"],
            sampled=stats.sampled_tokens,
            times=times(engine.ledger.calls()),
        )


async def _on_perdure(
    folder: Path, vocabulary: Path, engine: PacedEngine, said: str, options: argparse.Namespace
) -> dict[str, float]:
    home = Home(
        folder / "home",
        engine.url,
        variables={
            "PERDURE_ENGINE__TOKENIZER": str(vocabulary),
            "PERDURE_ENGINE__TOOL_CALL_PARSER": toy_vocabulary.TOOL_CALL_PARSER,
        },
    )
    tree = common_job.make_tree(folder / "tree")
    await asyncio.to_thread(home.add_instances, tree, options.steps * options.groups)
    with Meter.open("perdure", folder / "meter") as meter:
        stack = await asyncio.to_thread(Stack.start, home, meter)
        try:
            engine.reset()
            engine.ledger.clear()
            environment = {**home.environment(), "PERDURE_STORE": str(folder / "home/store")}
            environment.pop("PYTHONPATH")
            environment["TEMPORAL_ADDRESS"] = stack.state().temporal_address
            return dict(await trainers_here.run(str(PROGRAM), said, **environment))
        finally:
            await asyncio.to_thread(stack.stop)


def _row(one: Figures) -> str:
    t = one.times
    cells = (
        one.side,
        f"{one.right:.0f} of {one.rollouts}",
        f"{one.trained} / {one.sampled} = {one.trained / one.sampled:.1%}",
        f"{1000 * t.between_p50_s:.0f} / {1000 * t.between_p95_s:.0f}",
        f"{t.idle:.1%}",
        f"{t.busy_slots:.1f}",
        f"{t.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer_rollouts", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument(
        "--groups", type=int, default=2, help="groups a step; twice as many run at once"
    )
    parser.add_argument("--samples", type=int, default=4, help="rollouts a group")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--latency", type=float, default=1.5, help="median seconds of a model call")
    parser.add_argument("--step", type=float, default=5.0, help="seconds of an optimizer step")
    add_output(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
