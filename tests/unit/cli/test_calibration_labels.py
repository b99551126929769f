"""Rows that calibration has not proved are marked wherever the command line names them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.cli import calibration_labels
from perdure.cli.main import invoke
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.calibration_record import Calibration, Mark, digest_of
from perdure.storage.local_store import LocalStore
from perdure.types import (
    CalibrationState,
    Grade,
    Grading,
    Instance,
    Outcome,
    Rewards,
    Source,
    SourceKind,
    Twin,
    TwinDraw,
)

Said = Callable[..., str]
WRONG = "`patch` does not resolve it: FAIL_TO_PASS t::new FAILED"


def row(name: str) -> Instance:
    return Instance(
        instance_id=name,
        dataset="mine",
        problem_statement="-",
        source=Source(kind=SourceKind.DIRECTORY, image="x"),
        grading=Grading(fail_to_pass=("t::new",), pass_to_pass=("t::old", "t::shaky")),
    )


def record(name: str, state: CalibrationState, sandbox: str, **fields: object) -> Calibration:
    known = {"instance": f"mine/{name}", "instance_sha256": digest_of(row(name)), "runs": 3}
    return Calibration.model_validate({**known, "state": state, "sandbox": sandbox, **fields})


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Said:
    """What a command prints, over a store with a proved, a quarantined, a changed and a new row."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("PERDURE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    asyncio.run(_fill(LocalStore(tmp_path / "store")))

    def run(*words: str) -> str:
        assert invoke(words) == 0
        return capsys.readouterr().out

    return run


async def _fill(store: LocalStore) -> None:
    for name in ("changed", "good", "new", "wrong"):
        await instance_catalog.save(store, row(name))
    proved, bad = CalibrationState.PROVED, CalibrationState.QUARANTINED
    twin = Twin(tests=("t::new",), path="t.py", line=1, before=b"1", after=b"2", rule="literal")
    lists = {
        "fail_to_pass": ["t::new"],
        "pass_to_pass": ["t::old"],
        "dropped": {"t::shaky": "flaky"},
        "variants": ("renamed locals", "another equal expression"),
    }
    for one in (
        record("good", proved, "bubblewrap", twin_draws=(TwinDraw(runs=((twin,),)),), **lists),
        record("good", bad, "podman", reason="`patch` is timeout"),
        record("wrong", bad, "bubblewrap", reason=WRONG),
        record("changed", proved, "bubblewrap", instance_sha256="of an earlier row"),
    ):
        await calibration_record.save(store, one)


def test_a_list_of_instances_marks_each(said: Said) -> None:
    """By kind of sandbox; a record of an earlier row counts for nothing."""
    assert said("instances", "list", "mine").splitlines() == [
        "mine (4)",
        "  mine/changed  not calibrated",
        "  mine/good     proved in bubblewrap (strong twins of 1 of 1 test), "
        "quarantined in podman: `patch` is timeout",
        "  mine/new      not calibrated",
        f"  mine/wrong    quarantined in bubblewrap: {WRONG}",
    ]
    listed = json.loads(said("instances", "list", "mine", "--json"))["instances"]
    assert listed[3] == {
        "ref": "mine/wrong",
        "calibration": [{"sandbox": "bubblewrap", "state": "quarantined", "reason": WRONG}],
    }


def test_one_instance_shows_what_calibration_found(said: Said) -> None:
    """What is left of its lists, and its twins; or why it is quarantined."""
    told = {name: said("instances", "show", f"mine/{name}") for name in ("good", "wrong", "new")}

    assert (
        "calibration  proved in bubblewrap, 3 runs: 1 test to fix, 1 to keep, 1 dropped as flaky, "
        "1 twin proven under 2 other correct fixes; quarantined in podman" in told["good"]
    )
    assert f"calibration  quarantined in bubblewrap, 3 runs: {WRONG}" in told["wrong"]
    assert "calibration  not calibrated" in told["new"]
    assert json.loads(said("instances", "show", "mine/new", "--json"))["calibration"] == []


def test_a_plan_marks_what_it_would_run(said: Said) -> None:
    """A dataset leaves quarantined rows out; one that is named is run and marked."""
    plan = ("run", "mine", "-a", "oracle", "--dry-run", "--set", "phases.grade.provider=podman")

    assert "  mine/new  (not calibrated)" in said(*plan)
    assert "mine/good" not in said(*plan)
    assert "mine/wrong  (quarantined)" in said("run", "mine/wrong", *plan[2:5])
    document = json.loads(said("run", "mine", *plan[2:5], "--json"))
    assert document["not_calibrated"] == ["mine/changed", "mine/new"]
    assert document["quarantined"] == {"mine/wrong": WRONG}


def test_a_run_says_in_one_line_how_many_rows_are_not_calibrated() -> None:
    """Quarantined rows are named with their reasons: the first three, and how many more."""
    refs = [f"mine/n-{number}" for number in range(4)]
    found = {ref: Mark(None) for ref in refs}
    found |= {f"mine/q-{n}": Mark(CalibrationState.QUARANTINED, "why") for n in range(5)}

    assert calibration_labels.notes("mine", "podman", refs, found) == [
        *(f"left out, quarantined: mine/q-{n}: why" for n in range(3)),
        "left out, quarantined: 2 more",
        "4 of 4 instances not calibrated in podman: check them with "
        "`perdure instances calibrate mine`",
    ]


@pytest.mark.parametrize(
    ("state", "marked"),
    [(None, "; row not calibrated"), (CalibrationState.QUARANTINED, "; row quarantined"),
     (CalibrationState.PROVED, "")],
)  # fmt: skip
def test_a_shown_rollout_marks_the_row_of_its_grade(
    state: CalibrationState | None, marked: str, tmp_path: Path, said: Said
) -> None:
    """The line of the grade ends with what was known of the row when it was graded."""
    grade = Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0), calibration=state)
    attempt = "runs/r/rollouts/good/0/attempts/1/grade-7.json"
    store = LocalStore(tmp_path / "store")
    asyncio.run(store.put(attempt, grade.model_dump_json().encode()))

    assert f"grade resolved in 0.0 s{marked}\n" in said("show", "r/good")
