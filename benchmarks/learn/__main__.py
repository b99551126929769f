"""Trains a tiny model through the whole stack: `make learn`, or `python -m benchmarks.learn --seeds 1,2,3`.

Preparation, once: make and calibrate instances, let a scripted teacher work through lessons, train a
model on the exported lessons. Then for each seed: GRPO on real rollouts, with new weights in the running
engine after each step. The same command continues where it stopped. If a trainer ends early, it is
restarted together with everything else; TRL, which owns its engine, alone while the stack runs.
"""

import argparse
import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from benchmarks.cpu_measurement import Meter
from benchmarks.learn import toy_tasks, toy_vocabulary, training_report
from benchmarks.learn.training_plan import AGENT, Broken, Plan, Trainer, rollout_fields
from benchmarks.learn.training_stack import LearnHome, Live, installed, kill_everything
from benchmarks.perdure_stack import ROOT
from perdure.storage.store_url import open_store

FOLDER = ROOT / ".perdure/learn"
PICTURE = ROOT / "docs/pictures/learning.svg"
LESSONS, TRAINING, HELD_OUT = 720, 64, 32
LESSONS_AT_ONCE = 80
"""Rollouts per run. After every pause, a busy worker reads a run's whole history again."""
CAREFUL_SHARE = 0.38
"""The share of lessons with a careful teacher. The model then repairs about as often as the teacher."""
ROWS = "lessons.jsonl"
RECIPE = {"lessons": LESSONS, "training": TRAINING, "held_out": HELD_OUT, "careful": CAREFUL_SHARE}
TRIES = 3
"""Tries of a preparation step, and of a trainer that makes no progress."""
POLL_S = 0.2
Part = Literal["everything", "trainer", "gateway", "worker"]


class Kill(NamedTuple):
    """Kill -9 a part during the step after `step`. TRL's trainer takes its colocated engine along."""

    part: Part
    step: int


def main() -> None:
    given = _arguments()
    _end_cleanly()
    same_recipe(given.folder)
    installed()
    base = given.folder / "base"
    toy_vocabulary.write(base)
    home = LearnHome(given.folder / "home", "", tokenizer=base, agents=given.agents)
    made = toy_tasks.make_tasks(LESSONS, TRAINING, HELD_OUT)
    once(given.folder, "instances", lambda: asyncio.run(_save(home, made)))
    with live(home) as it:
        once(given.folder, "calibration", lambda: _calibrate(it))
        once(given.folder, "lessons", lambda: _teach(it, base, made.lessons))
        once(given.folder, "supervised training", lambda: _train_base(it, base))
        if given.trainer == "own":
            it.serve(base / "model")
        for seed in given.seeds:
            _one(it, _plan(given, seed, base), given.kill)
            if given.keep:
                training_report.keep(given.folder / "runs", training_report.KEPT, PICTURE)
    print(training_report.table(training_report.read(given.folder / "runs")))


def _end_cleanly() -> None:
    """Make a closed terminal and SIGTERM end all processes of the benchmark."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))


@contextmanager
def live(home: LearnHome) -> Iterator[Live]:
    with Meter.open("learn", home.folder / "meter") as meter:
        try:
            it = Live(home, meter)
            yield it
            it.stop()
        finally:
            kill_everything(meter)


# --- once -------------------------------------------------------------------------------------


def same_recipe(folder: Path) -> None:
    """Raises: SystemExit if another recipe made the folder, because its model would be another one."""
    file = folder / "recipe.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if known != RECIPE and (known or any(folder.glob("*.done"))):
        raise SystemExit(f"{folder} was made by another recipe: add --new to discard its runs")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(RECIPE))


def once(folder: Path, what: str, act: Callable[[], None]) -> None:
    """Run a step unless it was completed earlier. If it fails, run it again: steps are repeatable."""
    mark = folder / f"{what.replace(' ', '-')}.done"
    if mark.exists():
        return
    began = time.monotonic()
    for left in reversed(range(TRIES)):
        try:
            act()
            break
        except RuntimeError as error:
            if not left:
                raise
            print(f"{what} failed, retrying: {error}", flush=True)
    mark.touch()
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)


async def _save(home: LearnHome, made: toy_tasks.Tasks) -> None:
    store = open_store(home.settings)
    await toy_tasks.save(store, toy_tasks.LESSONS, made.lessons, "lesson")
    await toy_tasks.save(store, toy_tasks.DATASET, made.training, "train")
    await toy_tasks.save(store, toy_tasks.DATASET, made.held_out, "held")


def _calibrate(it: Live) -> None:
    """Check that gold resolves each instance of training and evaluation, and that the base does not."""
    it.perdure("instances", "calibrate", toy_tasks.DATASET, "--runs", "1", "-c", "16")


def _teach(it: Live, base: Path, lessons: Sequence[toy_tasks.Task]) -> None:
    """Run the teacher's rollouts, graded like all others, and export them."""
    scripts = base / "teacher.json"
    scripts.write_text(json.dumps({"scripts": list(_teacher(lessons))}))
    runs = range(-(-len(lessons) // LESSONS_AT_ONCE))
    with it.scripted(scripts):
        for number in runs:
            it.perdure("run", toy_tasks.LESSONS, *_lessons(number), "--wait")
    for number in runs:
        out = str(base / f"lessons-{number}.jsonl")
        it.perdure("export", f"lessons-{number}", "--format", "sft-tokens", "--out", out)
    found = [(base / f"lessons-{number}.jsonl").read_text() for number in runs]
    (base / ROWS).write_text("".join(found))


def _lessons(number: int) -> list[str]:
    """The options of one run of lessons."""
    words = ["--agent", AGENT, "-c", "16", "--run-id", f"lessons-{number}"]
    first = number * LESSONS_AT_ONCE
    for lesson in range(first, min(first + LESSONS_AT_ONCE, LESSONS)):
        words += ["--include", f"lesson-{lesson:03d}"]
    for name, value in rollout_fields()["agent_options"].items():
        words += ["--set", f"agent_options.{name}={json.dumps(value)}"]
    return words


def _train_base(it: Live, base: Path) -> None:
    training = it.in_vllm("benchmarks.learn.trainer.sft_training", str(base / ROWS), str(base))
    if training.wait() != 0:
        raise RuntimeError(f"supervised training ended with {training.returncode}")


def _teacher(lessons: Sequence[toy_tasks.Task]) -> Iterator[dict[str, object]]:
    """Commands for each lesson, from a teacher that is careful only in some lessons."""
    rng = random.Random(2)
    for task in lessons:
        is_careful = rng.random() < CAREFUL_SHARE
        commands = toy_tasks.careful(task) if is_careful else toy_tasks.sloppy(task, rng)
        calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
        yield {
            "match": f"{task.prompt}{toy_vocabulary.END}",
            "turns": [{"tool_calls": [call]} for call in calls],
        }


# --- a run ------------------------------------------------------------------------------------


def _plan(given: argparse.Namespace, seed: int, base: Path) -> Plan:
    name = f"seed-{seed}"
    name += f"-{given.trainer}" if given.trainer != "own" else ""
    name += f"-late-{given.staleness}" if given.staleness else ""
    name += f"-{given.broken}" if given.broken else ""
    name += "-killed" if given.kill else ""
    training = tuple(f"{toy_tasks.DATASET}/train-{n:03d}" for n in range(TRAINING))
    held_out = tuple(f"{toy_tasks.DATASET}/held-{n:03d}" for n in range(HELD_OUT))
    return Plan(
        name=name,
        folder=given.folder / "runs" / name,
        base=base,
        canary_rows=base / ROWS,
        training=training,
        held_out=held_out,
        seed=seed,
        steps=given.steps,
        groups=given.groups,
        samples=given.samples,
        staleness=given.staleness,
        broken=given.broken,
        trainer=given.trainer,
        learning_rate=given.learning_rate,
    )


def _one(it: Live, plan: Plan, kills: Sequence[Kill]) -> None:
    """Train to the end. Kills of steps that an earlier command has trained are left out."""
    tries, done = TRIES, training_report.steps_done(plan.figures)
    left: Sequence[Kill] = sorted(
        (kill for kill in kills if kill.step >= done), key=lambda kill: kill.step
    )
    while not training_report.is_finished(plan.figures, plan.steps):
        done = training_report.steps_done(plan.figures)
        print(f"{plan.name}: {done} of {plan.steps} steps are done", flush=True)
        trainer = it.train(plan)
        left = _kill_in_the_middle(it, plan, trainer, left)
        if trainer.wait() == 0:
            continue
        tries = TRIES if training_report.steps_done(plan.figures) > done else tries - 1
        if not tries:
            raise SystemExit(f"{plan.name}: the trainer ended with {trainer.returncode}")
        if plan.trainer == "trl" and it.stack.lives:
            print(f"the trainer ended with {trainer.returncode}: restarting it", flush=True)
            continue
        print(f"the trainer ended with {trainer.returncode}: restarting everything", flush=True)
        it.kill()
        it.restart()
        if plan.trainer == "own":
            it.serve(plan.base / "model")


def _kill_in_the_middle(
    it: Live, plan: Plan, trainer: "subprocess.Popen[bytes]", kills: Sequence[Kill]
) -> Sequence[Kill]:
    """Kill until the trainer has ended. Returns the kills of later steps."""
    for number, kill in enumerate(kills):
        while training_report.steps_done(plan.figures) < kill.step and trainer.poll() is None:
            time.sleep(POLL_S)
        if trainer.poll() is not None:
            return kills[number:]
        time.sleep(random.Random(plan.seed).uniform(2.0, 6.0))  # into the next step's rollouts
        if kill.part == "everything":
            print(f"killed {it.kill()} processes", flush=True)
        else:
            it.kill_part(kill.part, trainer)
            print(f"killed the {kill.part}", flush=True)
    return ()


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make learn", description=__doc__)
    parser.add_argument("--seeds", type=_numbers, default=(1, 2, 3), metavar="1,2,3")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="instances per step")
    parser.add_argument("--samples", type=int, default=8, help="rollouts per instance")
    parser.add_argument(
        "--staleness", type=int, default=0, help="weight versions between sampling and training"
    )
    parser.add_argument(
        "--trainer", choices=get_args(Trainer), default="own", help="trl owns its engine, on policy"
    )
    parser.add_argument(
        "--broken", choices=get_args(Broken), default="", help="make this error on purpose"
    )
    parser.add_argument(
        "--kill",
        type=_kills,
        default=(),
        metavar="gateway@5,everything@12",
        help=f"kill -9 parts ({', '.join(get_args(Part))}) after these steps",
    )
    parser.add_argument("--learning-rate", type=float, default=7e-4)
    parser.add_argument("--agents", type=int, default=16, help="sandboxes at once")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--new", action="store_true", help="discard all earlier runs")
    parser.add_argument(
        "--no-keep",
        dest="keep",
        action="store_false",
        help="do not update benchmarks/learn/results and the picture in the docs",
    )
    given = parser.parse_args(words)
    if given.trainer == "trl" and (given.staleness or given.broken):
        parser.error("--staleness and --broken are for --trainer own")
    if given.new:
        shutil.rmtree(given.folder, ignore_errors=True)
    given.folder = given.folder.absolute()
    return given


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _kills(text: str) -> tuple[Kill, ...]:
    found = []
    for one in text.split(","):
        part, _, step = one.partition("@")
        if part not in get_args(Part) or not step.isdigit():
            raise argparse.ArgumentTypeError(
                f"{one!r}: write a part ({', '.join(get_args(Part))}), @ and a step"
            )
        found.append(Kill(cast(Part, part), int(step)))
    return tuple(found)


if __name__ == "__main__":
    main()
