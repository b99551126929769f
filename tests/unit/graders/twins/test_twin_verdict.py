"""Two grades become one: official by the row's protocol, verified by the twins."""

from collections.abc import Iterator

import pytest

from perdure.graders.base import Graded
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.protocols import multi_swe
from perdure.graders.twins.paired_runs import verified
from perdure.graders.twins.twin_draw import Run
from perdure.graders.twins.twin_verdict import Ran, combined, follow_official_verdict
from perdure.graders.verdict_rules import make_grade, score
from perdure.testing.grader_contract import FAIL_TO_PASS, PASS_TO_PASS, tiny_instance
from perdure.types import Grade, Instance, Outcome, Rewards, TestStatus
from tests.unit.graders.twins.test_twin_draw import ADD, NEGATIVE

P, F, M = TestStatus.PASSED, TestStatus.FAILED, TestStatus.MISSING
INSTANCE = tiny_instance(twins=(ADD, NEGATIVE))


def grade(first: TestStatus, second: TestStatus, kept: TestStatus = P) -> Grade:
    """A grade with the statuses of both FAIL_TO_PASS tests, as a grader by lists makes it."""
    statuses = dict(zip(FAIL_TO_PASS, (first, second), strict=True))
    statuses |= dict.fromkeys(PASS_TO_PASS, kept)
    found = score(statuses, FAIL_TO_PASS, PASS_TO_PASS)
    return Grade(
        outcome=found.outcome,
        reason=found.reason,
        rewards=found.rewards,
        fail_to_pass=found.fail_to_pass,
        pass_to_pass=found.pass_to_pass,
    )


def ended(outcome: Outcome) -> Grade:
    return Grade(outcome=outcome, reason="ended", rewards=Rewards(binary=0.0))


def pair(with_add: Grade, with_negative: Grade) -> list[Ran]:
    """The first run has the twin of `add`, the second the twin of `negative`."""
    return [Ran(Run(INSTANCE, (ADD,)), with_add), Ran(Run(INSTANCE, (NEGATIVE,)), with_negative)]


def test_originals_that_pass_and_twins_that_fail_are_verified() -> None:
    found = combined(INSTANCE, pair(grade(F, P), grade(P, F)))

    assert (found.outcome, found.reward) == (Outcome.RESOLVED, 1.0)
    assert found.verification is not None
    assert (found.verification.state, found.verification.runs) == ("verified", 2)
    assert found.verification.twins == dict.fromkeys(FAIL_TO_PASS, F)


def test_a_twin_that_passes_exposes_a_forgery() -> None:
    found = combined(INSTANCE, pair(grade(P, P), grade(P, F)))

    assert (found.outcome, found.official, found.reward) == (
        Outcome.TAMPERED,
        Outcome.RESOLVED,
        0.0,
    )
    assert found.verification is not None
    assert found.verification.state == "exposed"
    assert follow_official_verdict(found).outcome is Outcome.RESOLVED
    assert follow_official_verdict(found).rewards.model_dump() == dict.fromkeys(
        Rewards.model_fields, 1.0
    )


def test_a_twin_that_did_not_run_is_no_failure_of_a_twin() -> None:
    found = combined(INSTANCE, pair(grade(M, P), grade(P, F)))

    assert (found.outcome, found.official) == (Outcome.UNRESOLVED, Outcome.RESOLVED)
    assert found.verification is not None
    assert found.verification.state == "unverified"


def test_an_honest_wrong_fix_that_meets_a_twin_is_unresolved() -> None:
    """Its original failed, so nothing was forged: the fix gives what the twin expects."""
    found = combined(INSTANCE, pair(grade(P, P), grade(F, F)))

    assert (found.outcome, found.official, found.verification) == (
        Outcome.UNRESOLVED,
        Outcome.UNRESOLVED,
        None,
    )
    assert found.rewards.f2p_fraction == 0.5


def test_a_run_out_of_time_is_never_exposed() -> None:
    one_twin = tiny_instance(twins=(ADD,), fail_to_pass=FAIL_TO_PASS[:1])
    runs = [Ran(Run(one_twin), grade(P, P)), Ran(Run(one_twin, (ADD,)), ended(Outcome.TIMEOUT))]

    found = combined(one_twin, runs)

    assert (found.outcome, found.official) == (Outcome.TIMEOUT, Outcome.RESOLVED)
    assert found.verification is not None
    assert found.verification.state == "unverified"


def test_a_test_without_a_twin_is_unverified_and_keeps_its_reward() -> None:
    instance = tiny_instance(twins=(ADD,))
    runs = [Ran(Run(instance, (ADD,)), grade(F, P)), Ran(Run(instance), grade(P, P))]

    found = combined(instance, runs)

    assert (found.outcome, found.reward) == (Outcome.RESOLVED, 1.0)
    assert found.verification is not None
    assert found.verification.state == "unverified"
    assert FAIL_TO_PASS[1] in found.verification.reason


async def graded_by(grades: Iterator[Grade]) -> tuple[Grade, int]:
    async def once(instance: Instance) -> Graded:
        return Graded(next(grades), b"")

    found = await verified(INSTANCE, 1, once)
    return found.grade, len(found.runs)


@pytest.mark.parametrize("outcome", [Outcome.TAMPERED, Outcome.TIMEOUT, Outcome.APPLY_FAILED])
async def test_a_first_run_that_decides_needs_no_second(outcome: Outcome) -> None:
    found, runs = await graded_by(iter([ended(outcome)]))

    assert (found.outcome, found.official, runs) == (outcome, outcome, 1)


async def test_an_unresolved_grade_keeps_its_fractions() -> None:
    """The second run's originals count for dense rewards, so it runs."""
    found, _ = await graded_by(iter([grade(F, F, kept=F), grade(F, F)]))

    assert (found.outcome, found.rewards.p2p_fraction) == (Outcome.UNRESOLVED, 0.0)
    assert set(found.fail_to_pass.values()) == {F}


async def test_later_pairs_run_only_if_the_first_is_verified() -> None:
    async def once(instance: Instance) -> Graded:
        return Graded(grade(P, P), b"")

    found = await verified(INSTANCE, 4, once)

    assert found.grade.outcome is Outcome.TAMPERED
    assert len(found.runs) == 2


async def test_an_instance_without_twins_is_graded_once_and_says_so() -> None:
    async def once(instance: Instance) -> Graded:
        return Graded(grade(P, P), b"")

    found = await verified(tiny_instance(), 1, once)

    assert (found.grade.reward, len(found.runs)) == (1.0, 1)
    assert found.grade.verification is not None
    assert found.grade.verification.state == "unverified"


def test_a_test_that_no_list_names_and_that_may_not_fail_is_no_twins_doing() -> None:
    """Multi-SWE-bench: a run that breaks such a test is officially unresolved, whatever twins do."""
    row = tiny_instance(protocol="multi_swe", twins=(ADD, NEGATIVE), must_not_fail=("other",))
    runs = pair(grade(F, P), grade(P, F))
    statuses = [{**ran.grade.fail_to_pass, **ran.grade.pass_to_pass, "other": F} for ran in runs]
    found = [multi_swe.judge(each, row.grading) for each in statuses]
    graded = [
        make_grade(multi_swe.MultiSweGrader(), each, b"", filter_patch(b"", row)) for each in found
    ]

    assert combined(row, [Ran(r.run, g) for r, g in zip(runs, graded, strict=True)]).outcome is (
        Outcome.UNRESOLVED
    )
