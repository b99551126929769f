"""A tiny model learns through the whole stack: `make learn`, or `python -m benchmarks.learn --seeds 1,2,3`.

Once: instances are made and calibrated, a scripted teacher works through lessons, a model is trained on
their export. Then for each seed: GRPO on real rollouts, with new weights in the running engine after each
step. The same command goes on where it was stopped.
"""

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from benchmarks.learn import report, tasks, vocabulary
from benchmarks.learn.plan import AGENT, Broken, Plan, rollout_fields
from benchmarks.learn.stack import LearnHome, Live, installed, kill_everything
from benchmarks.measuring import Meter
from benchmarks.perdure_stack import ROOT
from perdure.storage.base import open_store

FOLDER = ROOT / ".perdure/learn"
LESSONS, TRAINING, HELD_OUT = 300, 64, 32
LESSONS_AT_ONCE = 75
"""Rollouts of one run: a long run's history is read again after every pause of a busy worker."""
CAREFUL_SHARE = 0.45
"""Of the lessons; with the rest a model repairs about as often as it was shown."""
ROWS = "lessons.jsonl"
POLL_S = 0.2


def main() -> None:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its processes end too
    installed()
    base = given.folder / "base"
    vocabulary.write(base)
    home = LearnHome(given.folder / "home", "", tokenizer=base, agents=given.agents)
    made = tasks.make_tasks(LESSONS, TRAINING, HELD_OUT)
    once(given.folder, "instances", lambda: asyncio.run(_save(home, made)))
    with live(home) as it:
        once(given.folder, "calibration", lambda: _calibrate(it))
        once(given.folder, "lessons", lambda: _teach(it, base, made.lessons))
        once(given.folder, "supervised training", lambda: _train_base(it, base))
        it.serve(base / "model")
        for seed in given.seeds:
            _one(it, _plan(given, seed, base), given.kill_at)
    print(report.table(report.read(given.folder / "runs")))


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


def once(folder: Path, what: str, act: Callable[[], None]) -> None:
    """Do it unless an earlier call did it to the end."""
    mark = folder / f"{what.replace(' ', '-')}.done"
    if mark.exists():
        return
    began = time.monotonic()
    act()
    mark.touch()
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)


async def _save(home: LearnHome, made: tasks.Tasks) -> None:
    store = open_store(home.settings)
    await tasks.save(store, tasks.LESSONS, made.lessons, "lesson")
    await tasks.save(store, tasks.DATASET, made.training, "train")
    await tasks.save(store, tasks.DATASET, made.held_out, "held")


def _calibrate(it: Live) -> None:
    """Gold repairs each instance of training and evaluation, and the base does not."""
    it.perdure("instances", "calibrate", tasks.DATASET, "--runs", "1", "-c", "16")


def _teach(it: Live, base: Path, lessons: Sequence[tasks.Task]) -> None:
    """The teacher's rollouts, graded like all others, and Perdure's export of them."""
    scripts = base / "teacher.json"
    scripts.write_text(json.dumps({"scripts": list(_teacher(lessons))}))
    runs = range(-(-len(lessons) // LESSONS_AT_ONCE))
    with it.scripted(scripts):
        for number in runs:
            it.perdure("run", tasks.LESSONS, *_lessons(number), "--wait")
    for number in runs:
        out = str(base / f"lessons-{number}.jsonl")
        it.perdure("export", f"lessons-{number}", "--format", "sft-tokens", "--out", out)
    found = [(base / f"lessons-{number}.jsonl").read_text() for number in runs]
    (base / ROWS).write_text("".join(found))


def _lessons(number: int) -> list[str]:
    """The options of one run of lessons."""
    words = ["--agent", AGENT, "-c", "16", "--run-id", f"lessons-{number}"]
    first = number * LESSONS_AT_ONCE
    for lesson in range(first, first + LESSONS_AT_ONCE):
        words += ["--include", f"lesson-{lesson:03d}"]
    for name, value in rollout_fields()["agent_options"].items():
        words += ["--set", f"agent_options.{name}={json.dumps(value)}"]
    return words


def _train_base(it: Live, base: Path) -> None:
    """The engine starts meanwhile; it gets the weights of each run by an update."""
    training = it.in_vllm("benchmarks.learn.trainer.sft", str(base / ROWS), str(base))
    while not (base / "model").exists() and training.poll() is None:
        time.sleep(POLL_S)
    it.serve(base / "model")
    if training.wait() != 0:
        raise SystemExit(f"supervised training ended with {training.returncode}")


def _teacher(lessons: Sequence[tasks.Task]) -> Iterator[dict[str, object]]:
    """For each lesson the commands of a teacher who is careful in some of them."""
    rng = random.Random(2)
    for task in lessons:
        is_careful = rng.random() < CAREFUL_SHARE
        commands = tasks.careful(task) if is_careful else tasks.sloppy(task, rng)
        calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
        yield {
            "match": f"{task.prompt}{vocabulary.END}",
            "turns": [{"tool_calls": [call]} for call in calls],
        }


# --- a run ------------------------------------------------------------------------------------


def _plan(given: argparse.Namespace, seed: int, base: Path) -> Plan:
    name = f"seed-{seed}"
    name += f"-late-{given.staleness}" if given.staleness else ""
    name += f"-{given.broken}" if given.broken else ""
    name += "-killed" if given.kill_at else ""
    training = tuple(f"{tasks.DATASET}/train-{n:03d}" for n in range(TRAINING))
    held_out = tuple(f"{tasks.DATASET}/held-{n:03d}" for n in range(HELD_OUT))
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
        learning_rate=given.learning_rate,
    )


def _one(it: Live, plan: Plan, kill_at: int) -> None:
    """Train to the end; with `kill_at`, kill everything in the middle of that step and start again."""
    print(f"{plan.name}: {plan.steps} steps of {plan.groups} x {plan.samples}", flush=True)
    trainer = it.train(plan)
    if kill_at and not report.resumed(plan.figures):
        while report.steps_done(plan.figures) < kill_at and trainer.poll() is None:
            time.sleep(POLL_S)
        time.sleep(random.Random(plan.seed).uniform(2.0, 6.0))  # into the next step's rollouts
        print(f"killed {it.kill()} processes", flush=True)
        trainer.wait()
        it.restart()
        it.serve(plan.base / "model")
        trainer = it.train(plan)
    if trainer.wait() != 0:
        raise SystemExit(f"the trainer ended with {trainer.returncode}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make learn", description=__doc__)
    parser.add_argument("--seeds", type=_numbers, default=(1,), metavar="1,2,3")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--groups", type=int, default=6, help="instances of a step")
    parser.add_argument("--samples", type=int, default=8, help="rollouts of each")
    parser.add_argument("--staleness", type=int, default=0, help="versions off policy")
    parser.add_argument(
        "--broken", choices=get_args(Broken), default="", help="an error on purpose"
    )
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="kill -9 everything")
    parser.add_argument("--learning-rate", type=float, default=7e-4)
    parser.add_argument("--agents", type=int, default=16, help="sandboxes at once")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--new", action="store_true", help="forget all earlier runs")
    given = parser.parse_args()
    if given.new:
        shutil.rmtree(given.folder, ignore_errors=True)
    given.folder = given.folder.absolute()
    return given


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
