"""Tables and the curve of `make learn`."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from benchmarks.learn import training_report


def _step(number: int, reward: float) -> dict[str, Any]:
    seconds = {"wait_s": 10.0, "train_s": 1.0, "publish_s": 3.0}
    rollouts = {"engine": 8.0, "environment": 24.0, "waiting": 16.0}
    counts = {"graded": 7, "ungraded": 1, "sampled_tokens": 200, "sdk_cpu_s": 0.08, "load": 2.0}
    return {
        "step": number,
        "reward": reward,
        **seconds,
        **rollouts,
        **counts,
        "grpo": {"gap_max": 1e-5},
    }


def _run(folder: Path, name: str, rewards: list[float], *, finished: bool) -> None:
    (folder / name).mkdir(parents=True)
    told = {
        "plan": {"name": name},
        "seconds": 90.0,
        "finished": finished,
        "resumed_at": [],
        "steps": [_step(number, reward) for number, reward in enumerate(rewards)],
        "evaluations": [{"step": 0, "held_out": 0.25}],
    }
    (folder / name / "figures.json").write_text(json.dumps(told))


def test_an_unfinished_run_is_named_as_such(tmp_path: Path) -> None:
    """Its last steps are not the end of training."""
    _run(tmp_path, "seed-1", [0.25, 0.75], finished=False)
    lines = training_report.table(training_report.read(tmp_path)).splitlines()

    assert lines[2] == "| seed-1 (unfinished) | 2 | 0.25 | 0.50 | 0.50 | 0.25 |"


def test_costs_are_those_of_a_step_and_of_a_rollout(tmp_path: Path) -> None:
    _run(tmp_path, "seed-1", [0.25, 0.75], finished=True)
    lines = training_report.table(training_report.read(tmp_path)).splitlines()

    assert lines[-1] == (
        "| seed-1 | 1.5 | 10.0, 1.0, 3.0 | 3.0, 1.0, 2.0 | 20 | 10.0 | 1.0e-05 | 2.0 |"
    )


def test_the_picture_has_a_curve_for_each_run(tmp_path: Path) -> None:
    _run(tmp_path, "seed-1", [0.25, 0.75], finished=True)
    _run(tmp_path, "seed-2", [0.5], finished=True)
    picture = ET.fromstring(training_report.picture(training_report.read(tmp_path)))

    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 2


def test_a_run_without_a_step_is_left_out(tmp_path: Path) -> None:
    _run(tmp_path, "seed-1", [], finished=False)

    assert training_report.read(tmp_path) == []


def test_only_finished_runs_are_kept(tmp_path: Path) -> None:
    """The docs show what came to its end; an earlier result of the same run is replaced."""
    runs, kept, svg = tmp_path / "runs", tmp_path / "kept", tmp_path / "curve.svg"
    _run(runs, "seed-1", [0.25, 0.75], finished=True)
    _run(runs, "seed-2", [0.5], finished=False)
    kept.mkdir()
    (kept / "seed-1.json").write_text('{"steps": []}')
    training_report.keep(runs, kept, svg)

    assert [len(run["steps"]) for run in training_report.read(kept)] == [2]
    assert svg.read_text() == training_report.picture(training_report.read(kept))
