"""What the grades of gold and base prove about a row, and who gets the result."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.episodes.episode import EpisodeParts
from perdure.errors import ConfigurationError
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.calibration_record import Calibration, digest_of, joined
from perdure.rollouts.activity_messages import CalibrationPart, CalibrationRow, RowToConclude
from perdure.rollouts.calibration import calibration_stages
from perdure.rollouts.calibration.calibration_findings import Findings, findings
from perdure.rollouts.run_pages import select
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.testing.grader_contract import tiny_instance
from perdure.types import (
    CalibrationRequest,
    CalibrationState,
    Grade,
    Grading,
    Instance,
    Outcome,
    Rewards,
    RolloutStatus,
    RunRequest,
    Source,
    SourceKind,
    TestStatus,
    Twin,
    TwinDraw,
)
from tests.stored_episodes import store_episode

P, F, E = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR
GRADING = Grading(
    fail_to_pass=("fix", "more"),
    pass_to_pass=("old", "shaky"),
    test_patch=b"diff --git ...",
    test_cmd="pytest -rA",
)


def grade(outcome: Outcome = Outcome.RESOLVED, **statuses: TestStatus) -> Grade:
    """A grade in which every test passes unless named."""
    told = {"fix": P, "more": P, "old": P, "shaky": P} | statuses
    return Grade(
        outcome=outcome,
        reason="why",
        rewards=Rewards(binary=0.0),
        fail_to_pass={test: told[test] for test in GRADING.fail_to_pass},
        pass_to_pass={test: told[test] for test in GRADING.pass_to_pass},
    )


def base(**statuses: TestStatus) -> Grade:
    return grade(Outcome.UNRESOLVED, **({"fix": F, "more": E} | statuses))


def test_a_sound_row_keeps_its_lists() -> None:
    """Gold passes all tests in three runs, and the base fails what gold fixes in three runs."""
    found = findings(GRADING, [grade()] * 3, [base()] * 3)

    assert found == Findings("", ("fix", "more"), ("old", "shaky"), {}, base_passes=True)


def test_a_test_that_the_log_lacks_is_explained() -> None:
    """The reason is the grade's, which says what the log has instead."""
    gold = grade(Outcome.UNRESOLVED, more=TestStatus.MISSING).model_copy(
        update={"reason": "FAIL_TO_PASS more MISSING; the log has 1 test, such as '- more'"}
    )

    reason = findings(GRADING, [gold] * 3, [base()] * 3).reason

    assert reason.startswith("`patch` does not resolve it: FAIL_TO_PASS more MISSING; the log has")


@pytest.mark.parametrize(
    ("longest", "own", "limit"),
    [(0.0, 1800.0, 1800.0), (2.0, 1800.0, 300.0), (8.0, 1800.0, 400.0), (2.0, 90.0, 90.0)],
)
def test_the_time_limit_follows_the_calibrated_runs(
    longest: float, own: float, limit: float
) -> None:
    """Fifty times the longest run, at least five minutes and at most the row's own limit; also for a
    row without test lists."""
    for lists in ((), ("fix",)):
        row = Instance(
            instance_id="a",
            dataset="toy",
            problem_statement="x",
            source=Source(kind=SourceKind.DIRECTORY),
            grading=Grading(timeout_s=own, fail_to_pass=lists),
        )
        record = Calibration(
            instance=row.ref,
            instance_sha256="",
            sandbox="bubblewrap",
            state=CalibrationState.PROVED,
            runs=3,
            fail_to_pass=lists,
            longest_run_s=longest,
        )

        assert calibration_record.joined(row, record).grading.timeout_s == limit


@pytest.mark.parametrize("where", ["gold", "base"])
def test_a_flaky_test_leaves_the_lists(where: str) -> None:
    """If runs of one tree disagree, the test is dropped with its statuses, and the row is kept."""
    unlucky = {"gold": grade(Outcome.UNRESOLVED, shaky=F), "base": base(shaky=F)}[where]
    gold = [grade(), unlucky if where == "gold" else grade(), grade()]
    without = [base(), unlucky if where == "base" else base(), base()]

    found = findings(GRADING, gold, without)

    assert (found.reason, found.pass_to_pass) == ("", ("old",))
    assert found.dropped["shaky"].endswith("PASSED, FAILED, PASSED")


def test_a_fixed_test_that_the_base_passes_only_has_to_stay() -> None:
    """Such a test proves no fix, so it moves to PASS_TO_PASS."""
    found = findings(GRADING, [grade()] * 3, [base(more=P)] * 3)

    assert (found.fail_to_pass, found.pass_to_pass) == (("fix",), ("more", "old", "shaky"))


@pytest.mark.parametrize(
    ("gold", "without", "reason"),
    [
        ([grade(old=F)] * 2, [base()] * 2, "does not resolve it: PASS_TO_PASS old FAILED"),
        ([grade(fix=F)] * 2, [base()] * 2, "does not resolve it: FAIL_TO_PASS fix FAILED"),
        ([grade()] * 2, [base(fix=P, more=P)] * 2, "no FAIL_TO_PASS test tells"),
        ([grade(), grade(Outcome.TIMEOUT)], [base()] * 2, "`patch` is timeout: why"),
        ([grade()] * 2, [base(), grade(Outcome.TAMPERED)], "base without `patch` is tampered"),
        ([grade(Outcome.UNRESOLVED)] * 2, [base()] * 2, "does not resolve it: why"),
    ],
    ids=["p2p", "f2p", "no fix", "timeout", "tampered", "unexplained"],
)
def test_an_unsound_row_is_quarantined(
    gold: list[Grade], without: list[Grade], reason: str
) -> None:
    """The reason names the tree, the test and its status."""
    assert reason in findings(GRADING, gold, without).reason


def test_the_ceiling_counts_bases_that_fail_nothing_else() -> None:
    """A test that also fails on the base is not the model's fault, so the row is below the
    ceiling."""
    found = findings(GRADING, [grade()] * 2, [base(old=F)] * 2)

    assert (found.reason, found.base_passes) == ("", False)


def test_a_row_without_lists_is_judged_by_its_verdicts() -> None:
    """With exit codes, gold must resolve in every run and the base in none."""
    bare = Grading(protocol="eval_cmd", eval_cmd="true")
    resolved = Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0))
    failed = Grade(outcome=Outcome.UNRESOLVED, reason="exit code 1", rewards=Rewards(binary=0.0))

    assert findings(bare, [resolved] * 3, [failed] * 3).reason == ""
    assert "in 1 of 3 runs" in findings(bare, [resolved, failed, resolved], [failed] * 3).reason
    assert "base without" in findings(bare, [resolved] * 3, [resolved] * 3).reason


def instance(name: str, statement: str = "-") -> Instance:
    return Instance(
        instance_id=name,
        dataset="mine",
        problem_statement=statement,
        source=Source(kind=SourceKind.IMAGE),
        grading=GRADING,
    )


def record(row: Instance, state: CalibrationState, **fields: object) -> Calibration:
    known = {"instance": row.ref, "instance_sha256": digest_of(row), "sandbox": "bubblewrap"}
    return Calibration.model_validate({**known, "state": state, "runs": 3, **fields})


async def test_runs_of_a_dataset_leave_out_what_is_quarantined(tmp_path: Path) -> None:
    """Quarantined rows are left out before the limit applies. In another kind of sandbox nothing is
    known, so all rows run."""
    store = LocalStore(tmp_path)
    for name in ("a", "b", "c"):
        await instance_catalog.save(store, instance(name))
    await calibration_record.save(
        store, record(instance("a"), CalibrationState.QUARANTINED, reason="x")
    )
    run = RunRequest(run_id="r", dataset="mine", limit=2)

    assert await select(store, run, proved_in="bubblewrap") == ["mine/b", "mine/c"]
    assert await select(store, run, proved_in="podman") == ["mine/a", "mine/b"]
    one = run.model_copy(update={"include": ("a",)})
    with pytest.raises(ConfigurationError, match="quarantined rows are left out"):
        await select(store, one, proved_in="bubblewrap")


async def test_a_changed_row_is_not_calibrated(tmp_path: Path) -> None:
    """The record applies to the row as it was. The lists of a proved row replace the row's own."""
    store, row = LocalStore(tmp_path), instance("a")
    proved = record(row, CalibrationState.PROVED, fail_to_pass=["fix"], pass_to_pass=["old"])
    await calibration_record.save(store, proved)

    found = await calibration_record.read(store, row, "bubblewrap")
    assert found is not None
    assert calibration_record.joined(row, found).grading.fail_to_pass == ("fix",)
    assert await calibration_record.read(store, instance("a", "changed"), "bubblewrap") is None


def test_a_calibration_is_joined_only_by_the_same_one() -> None:
    """The concurrency does not affect the measurement, and all other fields do."""
    asked = CalibrationRequest(dataset="mine")
    others: list[dict[str, Any]] = [
        {"runs": 2},
        {"rollout": {"sandbox": "podman"}},
        {"include": ("a*",)},
        {"round": 1},
    ]

    assert asked.model_copy(update={"concurrency": 1}).workflow_id == asked.workflow_id
    assert len({asked.model_copy(update=one).workflow_id for one in others}) == 4


async def play(
    store: LocalStore, row: CalibrationRow, asked: CalibrationRequest, agent: str, *grades: Grade
) -> None:
    """Finished rollouts of an agent, one per grade."""
    for number, grade in enumerate(grades):
        rollout = row.rollout(asked, agent, number)
        graded = EpisodeParts(rollout, RolloutStatus.GRADED, 0.0, 1.0, grade=grade)
        await store_episode(store, graded)


async def test_the_report_tells_ceiling_and_floor_of_a_dataset(tmp_path: Path) -> None:
    """Ceiling: runs of gold that resolve. Floor: runs of the base that resolve. Every undecided row
    has its reason."""
    store, asked = LocalStore(tmp_path), CalibrationRequest(dataset="mine", runs=2)
    names = ("free", "open", "sound", "wrong")
    for name in names:
        await instance_catalog.save(store, instance(name))
    refs = [f"mine/{name}" for name in names]
    await store.put(store_keys.calibration_rows(asked.workflow_id), json.dumps(refs).encode())
    part = CalibrationPart(calibration=asked, start=0, stop=50)
    free, left_open, sound, wrong = (await calibration_stages.load_part(store, part)).rows
    for row, gold, without in (
        (free, [grade()] * 2, [grade()] * 2),
        (left_open, [grade()] * 2, [base()]),
        (sound, [grade(), grade(Outcome.UNRESOLVED, shaky=F)], [base(old=F)] * 2),
        (wrong, [grade(Outcome.UNRESOLVED, fix=F)] * 2, [base()] * 2),
    ):
        await play(store, row, asked, "oracle", *gold)
        await play(store, row, asked, "nop", *without)
        await calibration_stages.conclude(store, RowToConclude(calibration=asked, row=row))

    told = await calibration_stages.report(store, asked)

    assert (told.rows, told.proved, told.quarantined, told.undecided) == (4, 1, 2, 1)
    assert (told.ceiling, told.floor) == (round(3 / 6, 4), round(2 / 6, 4))
    assert (told.base_passes, told.dropped_tests) == (round(2 / 3, 4), 1)
    assert list(told.why_quarantined) == ["mine/free", "mine/wrong"]
    assert "a rollout of nop has not finished" in told.why_undecided["mine/open"]
    report = json.loads((await store.get(store_keys.calibration_report(asked.workflow_id))).data)
    assert report["summary"]["ceiling"] == told.ceiling
    assert report["rows"]["mine/sound"]["dropped"] == {
        "shaky": "flaky with `patch`: PASSED, FAILED"
    }
    again = (await calibration_stages.load_part(store, part)).rows
    assert [row.state for row in again] == ["quarantined", "", "", "quarantined"]
    bare = part.model_copy(update={"calibration": asked.model_copy(update={"twins": 0})})
    await store.put(
        store_keys.calibration_rows(bare.calibration.workflow_id), json.dumps(refs).encode()
    )
    assert (await calibration_stages.load_part(store, bare)).rows[
        2
    ].state == "proved"  # it lacks only twins


@pytest.mark.parametrize(
    ("variants", "counted"),
    [((), 0), (("renamed locals",), 0), (("renamed locals", "another equal expression"), 1)],
)
async def test_the_report_counts_rows_whose_twins_hold_for_other_correct_fixes(
    variants: tuple[str, ...], counted: int, tmp_path: Path
) -> None:
    """One variant of gold shows little, and twins without any are no evidence for other fixes."""
    store, asked = LocalStore(tmp_path), CalibrationRequest(dataset="mine")
    row = instance("sound")
    await instance_catalog.save(store, row)
    await store.put(store_keys.calibration_rows(asked.workflow_id), json.dumps([row.ref]).encode())
    twin = Twin(tests=("fix",), path="t.py", line=1, before=b"b", after=b"c", rule="literal")
    record = Calibration(
        instance=row.ref,
        instance_sha256=digest_of(row),
        sandbox="bubblewrap",
        state=CalibrationState.PROVED,
        runs=3,
        twin_draws=(TwinDraw(runs=((twin,),)),),
        variants=variants,
    )
    await calibration_record.save(store, record)

    told = await calibration_stages.report(store, asked)

    assert (told.with_twins, told.under_other_fixes) == (1, counted)
    report = json.loads((await store.get(store_keys.calibration_report(asked.workflow_id))).data)
    assert report["rows"][row.ref]["variants"] == list(variants)


def test_a_row_graded_by_exit_code_gets_its_twins_and_a_row_its_canary() -> None:
    """Such a row has no list of tests; grading without its twins would be unverified."""
    row = tiny_instance(protocol="eval_cmd", fail_to_pass=(), pass_to_pass=())
    twin = Twin(tests=("exit code",), path="t.c", line=1, before=b"b", after=b"c", rule="literal")
    draws = (TwinDraw(runs=((twin,),)),)
    record = Calibration(
        instance=row.ref,
        instance_sha256=digest_of(row),
        sandbox="bubblewrap",
        state=CalibrationState.PROVED,
        runs=3,
        twin_draws=draws,
        canary=True,
    )
    grading = joined(row, record).grading

    assert (grading.twin_draws, grading.canary) == (draws, True)
    assert not joined(row, record.model_copy(update={"twin_draws": None})).grading.canary
