"""`make learn` without anybody beside it: what it repeats, where it goes on, and when it gives up."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.learn import __main__ as learn
from benchmarks.learn import training_report
from benchmarks.learn.training_plan import Plan
from benchmarks.learn.training_stack import Live

RUNNING = None


def _given(folder: Path, *words: str) -> Plan:
    """The plan of a command's first seed."""
    given = learn._arguments([*words, "--folder", str(folder)])
    return learn._plan(given, given.seeds[0], folder / "base")


class Trainer:
    """Trains some steps and ends; a trainer that is still to be killed runs until then."""

    def __init__(self, plan: Plan, steps: int, code: int | None) -> None:
        self.returncode = code
        found = json.loads(plan.figures.read_text()) if plan.figures.exists() else {"steps": []}
        resumed = [len(found["steps"])] if found["steps"] else []
        told = {
            "plan": {"name": plan.name, "steps": plan.steps},
            "steps": [{"step": n, "reward": 1.0} for n in range(len(found["steps"]) + steps)],
            "finished": code == 0,
            "resumed_at": resumed,
            "evaluations": [],
        }
        plan.figures.parent.mkdir(parents=True, exist_ok=True)
        plan.figures.write_text(json.dumps(told))

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        assert self.returncode is not RUNNING
        return self.returncode


class Processes:
    """`Live` with trainers that end as given: (steps, exit code)."""

    def __init__(self, *ends: tuple[int, int | None]) -> None:
        self.stack = SimpleNamespace(lives=True)
        self.ends = list(ends)
        self.last: Trainer | None = None
        self.done: list[str] = []

    def train(self, plan: Plan) -> Trainer:
        self.last = Trainer(plan, *self.ends.pop(0))
        return self.last

    def kill(self) -> int:
        self.done.append("kill")
        self.stack.lives = False
        if self.last is not None and self.last.returncode is RUNNING:
            self.last.returncode = -9
        return 7

    def kill_part(self, part: str, trainer: Trainer) -> None:
        self.done.append(f"kill {part}")
        if part == "trainer":
            trainer.returncode = -9

    def restart(self) -> None:
        self.done.append("restart")
        self.stack.lives = True

    def serve(self, model: Path) -> None:
        self.done.append(f"serve {model.name}")


def _one(processes: Processes, plan: Plan, *kills: tuple[learn.Part, int]) -> None:
    learn._one(cast(Live, processes), plan, [learn.Kill(*kill) for kill in kills])


AGAIN = ["kill", "restart", "serve model"]


def test_a_trainer_that_ends_early_is_started_again_with_everything(tmp_path: Path) -> None:
    processes = Processes((5, 1), (3, 1), (2, 0))
    plan = _given(tmp_path)
    _one(processes, plan)

    assert training_report.is_finished(plan.figures, plan.steps)
    assert processes.done == [*AGAIN, *AGAIN]


def test_a_trainer_without_progress_is_given_up(tmp_path: Path) -> None:
    processes = Processes((5, 1), (0, 1), (0, 1), (0, 1))

    with pytest.raises(SystemExit, match="seed-1: the trainer ended with 1"):
        _one(processes, _given(tmp_path))
    assert processes.ends == []


def test_a_finished_seed_is_not_trained_again(tmp_path: Path) -> None:
    plan = _given(tmp_path)
    _one(Processes((40, 0)), plan)
    _one(Processes(), plan)

    assert training_report.steps_done(plan.figures) == 40


def test_more_steps_continue_a_finished_seed(tmp_path: Path) -> None:
    _one(Processes((40, 0)), _given(tmp_path))
    longer = _given(tmp_path, "--steps", "60")
    _one(Processes((20, 0)), longer)

    assert training_report.steps_done(longer.figures) == 60


def test_everything_is_killed_once_at_the_step_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer that goes on is left alone, although its figures were not written again yet."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    processes = Processes((12, RUNNING), (0, 1), (28, 0))
    _one(processes, _given(tmp_path, "--kill", "everything@12"), ("everything", 12))

    assert processes.done == ["kill", *AGAIN, *AGAIN]


def test_a_killed_trl_is_started_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is in its process. The stack restarts a killed gateway and worker itself."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    processes = Processes((12, RUNNING), (28, 0))
    kills: list[tuple[learn.Part, int]] = [("trainer", 12), ("worker", 8), ("gateway", 4)]
    plan = _given(tmp_path, "--trainer", "trl", "--kill", "trainer@12")
    _one(processes, plan, *kills)

    assert training_report.steps_done(plan.figures) == 40
    assert processes.done == ["kill gateway", "kill worker", "kill trainer"]


def test_trl_is_started_again_with_the_stack_if_everything_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perdure serves no engine of its own for it."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    processes = Processes((12, RUNNING), (28, 0))
    _one(processes, _given(tmp_path, "--trainer", "trl"), ("everything", 12))

    assert processes.done == ["kill", "kill", "restart"]


def test_a_command_that_continues_does_not_repeat_its_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    plan = _given(tmp_path, "--trainer", "trl")
    _one(Processes((5, 1), (8, 1), (0, 0)), plan)
    longer = _given(tmp_path, "--trainer", "trl", "--steps", "60")
    processes = Processes((0, RUNNING), (47, 0))
    _one(processes, longer, ("gateway", 4), ("trainer", 13))

    assert processes.done == ["kill trainer"]


def test_trl_resumes_from_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    """A kill during a save leaves a folder without the trainer's state."""
    plan = _given(tmp_path, "--trainer", "trl")
    for number, name in (
        (8, "trainer_state.json"),
        (10, "trainer_state.json"),
        (12, "optimizer.pt"),
    ):
        folder = plan.checkpoints / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        (folder / name).touch()

    assert plan.checkpoint() == plan.checkpoints / "checkpoint-10"
    assert _given(tmp_path, "--trainer", "own").checkpoint() is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kill engine@3", "'engine@3': write a part"),
        ("--kill gateway", "'gateway': write a part"),
        ("--trainer trl --staleness 1", "are for --trainer own"),
        ("--trainer trl --broken split", "are for --trainer own"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        _given(tmp_path, *words.split())

    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name", "chosen"),
    [
        ("--staleness 1", "seed-1-late-1", {"staleness": 1}),
        ("--staleness 2 --seeds 3", "seed-3-late-2", {"staleness": 2, "seed": 3}),
        ("--kill everything@12", "seed-1-killed", {"staleness": 0, "broken": ""}),
        ("--trainer trl", "seed-1-trl", {"trainer": "trl"}),
        ("--trainer trl --kill trainer@3", "seed-1-trl-killed", {"trainer": "trl"}),
        ("--broken reencode", "seed-1-reencode", {"broken": "reencode"}),
        ("--broken temperature", "seed-1-temperature", {"broken": "temperature"}),
        ("--broken split", "seed-1-split", {"broken": "split"}),
    ],
)
def test_each_variant_is_a_run_of_its_own(
    tmp_path: Path, words: str, name: str, chosen: dict[str, Any]
) -> None:
    """So that it takes no rollout of another, and stands apart in tables and pictures."""
    plan = _given(tmp_path, *words.split())

    assert plan.name == plan.folder.name == name
    assert plan.model_dump() | chosen == plan.model_dump()
    assert plan.group(0, "repairs/train-000", 0).rollout.run_id == f"{name}-b000"


@pytest.mark.parametrize(("broken", "sampled_at"), [("temperature", 0.7), ("", 1.0)])
def test_held_out_instances_are_always_sampled_at_one(
    tmp_path: Path, broken: str, sampled_at: float
) -> None:
    """Otherwise a lower temperature would look like learning."""
    plan = _given(tmp_path, *(["--broken", broken] if broken else []))
    trained = plan.group(0, "repairs/train-000", 0).rollout

    assert trained.sampling.temperature == sampled_at
    assert cast(Any, plan.evaluation(0).rollout)["sampling"]["temperature"] == 1.0


def _failing(times: int, calls: list[int]) -> Callable[[], None]:
    def act() -> None:
        calls.append(1)
        if len(calls) <= times:
            raise RuntimeError("a busy host")

    return act


def test_a_failed_preparation_is_repeated_and_a_done_one_is_not(tmp_path: Path) -> None:
    calls: list[int] = []
    learn.once(tmp_path, "supervised training", _failing(2, calls))
    learn.once(tmp_path, "supervised training", _failing(9, calls))

    assert len(calls) == 3
    with pytest.raises(RuntimeError, match="a busy host"):
        learn.once(tmp_path, "lessons", _failing(9, []))


def test_another_recipes_folder_is_refused(tmp_path: Path) -> None:
    """Its model was taught otherwise, so its curve would be another's."""
    learn.same_recipe(tmp_path)
    learn.same_recipe(tmp_path)
    (tmp_path / "recipe.json").write_text(json.dumps(learn.RECIPE | {"lessons": 300}))

    with pytest.raises(SystemExit, match="add --new"):
        learn.same_recipe(tmp_path)


def test_every_lesson_is_given_once() -> None:
    runs = -(-learn.LESSONS // learn.LESSONS_AT_ONCE)
    given = [word for number in range(runs) for word in learn._lessons(number) if "lesson-" in word]

    assert given == [f"lesson-{number:03d}" for number in range(learn.LESSONS)]
