"""Results of other programs: what counts as a verdict, as work to grade, and as neither."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.adoption import reader_process, result_formats
from perdure.adoption.foreign_rollouts import ForeignRollout
from perdure.errors import ConfigurationError, MissingDependency

DIFF = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\r\n"
Found = dict[str, tuple[str | None, dict[str, float] | None]]


def found(folder: Path) -> Found:
    """Instance id -> its patch and its scores."""
    rollouts = result_formats.read(folder).rollouts
    return {one.instance_id: (one.patch, one.scores) for one in rollouts}


def prediction(name: str, patch: str | None = DIFF) -> dict[str, Any]:
    return {"instance_id": name, "model_name_or_path": "m", "model_patch": patch}


def save_trajectory(folder: Path, name: str, status: str, submission: str) -> None:
    info = {"exit_status": status, "submission": submission}
    path = folder / name / f"{name}.traj.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"info": info, "messages": [], "instance_id": name}))


def test_an_error_in_place_of_an_end_is_no_work(tmp_path: Path) -> None:
    """mini-swe-agent writes an empty patch if its model or its sandbox failed. Perdure samples those
    again, and grades what the agent itself ended."""
    save_trajectory(tmp_path, "done", "Submitted", DIFF)
    save_trajectory(tmp_path, "limit", "LimitsExceeded", "")
    save_trajectory(tmp_path, "api", "AuthenticationError", "")
    predictions = {name: prediction(name, "") for name in ("limit", "api", "no-sandbox")}
    (tmp_path / "preds.json").write_text(json.dumps({"done": prediction("done"), **predictions}))

    assert found(tmp_path) == {
        "done": (DIFF, None),
        "limit": ("", None),
        "api": (None, None),
        "no-sandbox": (None, None),
    }


def test_files_that_a_kill_cut_off_are_named_and_lack_a_result(tmp_path: Path) -> None:
    """The rest is read, whichever file was being written."""
    save_trajectory(tmp_path, "done", "Submitted", DIFF)
    save_trajectory(tmp_path, "cut", "Submitted", DIFF)
    cut = tmp_path / "cut" / "cut.traj.json"
    cut.write_bytes(cut.read_bytes()[:30])
    (tmp_path / "preds.json").write_text('{"done": {"model_patch": "di')

    reading = result_formats.read(tmp_path)

    assert [one.instance_id for one in reading.rollouts] == ["done"]
    assert [note.split(" is ")[0] for note in reading.notes] == ["cut/cut.traj.json", "preds.json"]


def test_the_last_line_of_predictions_may_be_cut_off(tmp_path: Path) -> None:
    """A broken line in the middle is refused with its number."""
    file = tmp_path / "preds.jsonl"
    file.write_text(json.dumps(prediction("a-1")) + '\n{"instance_id": "b-')
    assert list(found(file)) == ["a-1"]

    file.write_text('{"instance_id": "b-\n' + json.dumps(prediction("a-1")) + "\n")
    with pytest.raises(ConfigurationError, match=r"preds\.jsonl line 1 is not valid JSON"):
        result_formats.read(file)


def test_reports_of_swe_bench_are_its_verdicts(tmp_path: Path) -> None:
    """An error there, or an unresolved instance whose infrastructure failed, is no verdict, so the patch
    is graded."""
    names = ("good", "bad", "lost", "error", "single")
    (tmp_path / "preds.json").write_text(json.dumps({name: prediction(name) for name in names}))
    summary = {"resolved_ids": ["good"], "unresolved_ids": ["bad", "lost"], "error_ids": ["error"]}
    (tmp_path / "m.run.json").write_text(json.dumps({**summary, "infra_failure_ids": ["lost"]}))
    report = tmp_path / "logs/run_evaluation/run/m/single/report.json"
    report.parent.mkdir(parents=True)
    fields = {"patch_successfully_applied": True, "resolved": True}
    report.write_text(json.dumps({"single": fields}))

    assert found(tmp_path) == {
        "good": (DIFF, {"resolved": 1.0}),
        "bad": (DIFF, {"resolved": 0.0}),
        "lost": (DIFF, None),
        "error": (DIFF, None),
        "single": (DIFF, {"resolved": 1.0}),
    }


def _nothing(path: Path) -> None:
    (path / "notes.txt").write_text("x")


def _patch_is_a_number(path: Path) -> None:
    (path / "preds.json").write_text(json.dumps({"a-1": {"model_patch": 3}}))


def _no_name(path: Path) -> None:
    (path / "preds.json").write_text(json.dumps([prediction("")]))


def _reports_disagree(path: Path) -> None:
    (path / "preds.json").write_text(json.dumps([prediction("a-1")]))
    for name, ids in {"1": (["a-1"], []), "2": ([], ["a-1"])}.items():
        document = {"resolved_ids": ids[0], "unresolved_ids": ids[1]}
        (path / f"report-{name}.json").write_text(json.dumps(document))


def _jobs_folder(path: Path) -> None:
    (path / "night" / "a-1__x").mkdir(parents=True)
    for folder in (path / "night", path / "night" / "a-1__x"):
        (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_nothing, "a job of Harbor .* logs of Inspect"),
        (_patch_is_a_number, r"preds\.json: a-1: `model_patch` must be text or null"),
        (_no_name, r"entry 1 lacks `instance_id`"),
        (_reports_disagree, r"report-1\.json and report-2\.json disagree about a-1: remove one"),
        (_jobs_folder, r"holds 1 jobs of Harbor: give one, such as .*night"),
    ],
)
def test_a_mistake_is_refused_with_its_file_and_its_fix(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path)

    with pytest.raises(ConfigurationError, match=message):
        result_formats.read(tmp_path)


def test_a_python_without_the_package_is_named(tmp_path: Path) -> None:
    """The error says which option takes another interpreter."""
    with pytest.raises(MissingDependency, match=r"has no harbor.*--reader-python"):
        reader_process.read(reader_process.HARBOR, tmp_path, sys.executable)


def test_a_patch_keeps_its_bytes() -> None:
    patch = b"+caf\xe9\r\n".decode("utf-8", "surrogateescape")
    one = ForeignRollout(instance_id="a-1", origin="x", file="y", patch=patch)

    assert one.data == b"+caf\xe9\r\n"
