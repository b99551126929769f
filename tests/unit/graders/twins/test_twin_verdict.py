"""The runs of a grading become one grade: official by the originals, verified by the twins."""

import asyncio
from collections.abc import Callable

import pytest

from perdure.errors import Boundary, RetryHere
from perdure.graders.base import Graded
from perdure.graders.twins.paired_runs import verified
from perdure.graders.twins.patch_lines import with_twins
from perdure.graders.twins.twin_draw import Run
from perdure.graders.twins.twin_verdict import Ran, combined, follow_official_verdict
from perdure.graders.verdict_rules import score
from perdure.testing.grader_contract import FAIL_TO_PASS, PASS_TO_PASS, tiny_instance
from perdure.types import Grade, Instance, Outcome, Rewards, TestStatus, Twin
from tests.unit.graders.twins.test_twin_draw import ADD, DIVIDED, NEGATIVE

P, F, M = TestStatus.PASSED, TestStatus.FAILED, TestStatus.MISSING
INSTANCE = tiny_instance(twin_draws=(DIVIDED,))


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


ALL_PASS = grade(P, P)


def ran(with_add: Grade, with_negative: Grade, originals: Grade = ALL_PASS) -> list[Ran]:
    """The run of originals, then one run with the twin of `add` and one with that of `negative`."""
    runs = Run(INSTANCE), Run(INSTANCE, (ADD,)), Run(INSTANCE, (NEGATIVE,))
    grades = originals, with_add, with_negative
    return [Ran(run, grade) for run, grade in zip(runs, grades, strict=True)]


def test_originals_that_pass_and_twins_that_fail_are_verified() -> None:
    found = combined(INSTANCE, ran(grade(F, P), grade(P, F)))

    assert (found.outcome, found.reward) == (Outcome.RESOLVED, 1.0)
    assert found.verification is not None
    assert (found.verification.state, found.verification.runs) == ("verified", 3)
    assert found.verification.twins == dict.fromkeys(FAIL_TO_PASS, F)


def test_a_success_that_a_recognizable_twin_checked_is_weak() -> None:
    runs = ran(grade(F, P), grade(P, F))
    weak = ADD.model_copy(update={"weak": True})
    runs[1] = Ran(Run(INSTANCE, (weak,)), runs[1].grade)
    found = combined(INSTANCE, runs)

    assert found.reward == 1.0
    assert found.verification is not None
    assert found.verification.state == "weak"
    assert FAIL_TO_PASS[0] in found.verification.reason


def test_a_twin_that_passes_exposes_a_forgery() -> None:
    found = combined(INSTANCE, ran(grade(P, P), grade(P, F)))

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
    found = combined(INSTANCE, ran(grade(M, P), grade(P, F)))

    assert (found.outcome, found.official) == (Outcome.UNRESOLVED, Outcome.RESOLVED)
    assert found.verification is not None
    assert found.verification.state == "unverified"


def test_an_honest_wrong_fix_that_meets_a_twin_is_unresolved() -> None:
    """Its original failed, so nothing was forged: the fix gives what the twin expects."""
    found = combined(INSTANCE, ran(grade(P, P), grade(F, F), originals=grade(F, P)))

    assert (found.outcome, found.official, found.verification) == (
        Outcome.UNRESOLVED,
        Outcome.UNRESOLVED,
        None,
    )
    assert found.rewards.f2p_fraction == 0.5


def test_a_forger_that_fails_all_tests_of_a_run_is_not_verified() -> None:
    """A run with twins has originals too, and they must pass."""
    found = combined(INSTANCE, ran(grade(F, F), grade(P, F)))

    assert (found.outcome, found.official, found.reward) == (
        Outcome.UNRESOLVED,
        Outcome.RESOLVED,
        0.0,
    )
    assert FAIL_TO_PASS[1] in found.reason


def test_a_run_out_of_time_is_never_exposed() -> None:
    found = combined(INSTANCE, ran(ended(Outcome.TIMEOUT), grade(P, F)))

    assert (found.outcome, found.official) == (Outcome.TIMEOUT, Outcome.RESOLVED)
    assert found.verification is not None
    assert found.verification.state == "unverified"


def test_a_test_without_a_twin_is_unverified_and_keeps_its_reward() -> None:
    found = combined(INSTANCE, ran(grade(F, P), grade(P, F))[:2])

    assert (found.outcome, found.reward) == (Outcome.RESOLVED, 1.0)
    assert found.verification is not None
    assert found.verification.state == "unverified"
    assert FAIL_TO_PASS[1] in found.verification.reason


class Sandboxes:
    """Grades each run by its originals and twins, as a fix or a forger makes the tests end."""

    def __init__(self, grades: Callable[[bytes], Grade]) -> None:
        self._grades = grades
        self.started: list[bytes] = []
        self.cancelled = 0
        self.at_work = self.most_at_work = 0
        self.hang: frozenset[bytes] = frozenset()
        """Runs that do not end."""

    async def once(self, instance: Instance) -> Graded:
        run = instance.grading.test_patch
        self.started.append(run)
        self.at_work += 1
        self.most_at_work = max(self.at_work, self.most_at_work)
        try:
            await (asyncio.Event().wait() if run in self.hang else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_work -= 1
        return Graded(self._grades(run), run)


ORIGINALS = with_twins(INSTANCE.grading.test_patch, ())


def honest(run: bytes) -> Grade:
    return grade(F if ADD.after in run else P, F if NEGATIVE.after in run else P)


@pytest.mark.parametrize("outcome", [Outcome.TAMPERED, Outcome.TIMEOUT, Outcome.UNRESOLVED])
async def test_originals_without_success_end_the_other_runs(outcome: Outcome) -> None:
    """No sandbox of a run that cannot change the verdict stays."""
    sandboxes = Sandboxes(lambda _: ended(outcome))
    sandboxes.hang = frozenset(
        with_twins(INSTANCE.grading.test_patch, [t]) for t in (ADD, NEGATIVE)
    )
    found = await verified(INSTANCE, 1, sandboxes.once)

    assert (found.grade.outcome, found.grade.official) == (outcome, outcome)
    assert [graded.log for graded in found.runs] == [ORIGINALS]
    assert (sandboxes.cancelled, sandboxes.at_work) == (2, 0)


async def test_an_unresolved_grade_keeps_its_fractions() -> None:
    sandboxes = Sandboxes(lambda _: grade(F, F, kept=F))
    found = (await verified(INSTANCE, 1, sandboxes.once)).grade

    assert (found.outcome, found.rewards.p2p_fraction) == (Outcome.UNRESOLVED, 0.0)
    assert set(found.fail_to_pass.values()) == {F}


@pytest.mark.parametrize(("at_once", "most"), [(True, 3), (False, 1)])
async def test_all_runs_start_together_unless_each_sandbox_needs_a_permit(
    at_once: bool, most: int
) -> None:
    """Code that knows the order of its runs could pass the first and fail the second."""
    sandboxes = Sandboxes(honest)
    found = await verified(INSTANCE, 1, sandboxes.once, at_once=at_once)

    assert found.grade.reward == 1.0
    assert found.runs[0].log == ORIGINALS  # the log of a rollout shows what the row's tests said
    assert (len(sandboxes.started), sandboxes.most_at_work) == (3, most)


async def test_pairs_do_not_overlap_and_the_first_doubt_ends_them() -> None:
    """So code under test in one pair can tell another nothing, and has to guess again in each."""
    sandboxes = Sandboxes(honest)
    confirmed = await verified(INSTANCE, 3, sandboxes.once)
    forged = Sandboxes(lambda _: grade(P, P))
    exposed = await verified(INSTANCE, 3, forged.once)

    assert (confirmed.grade.reward, len(confirmed.runs), sandboxes.most_at_work) == (1.0, 9, 3)
    pairs = [sandboxes.started[n : n + 3] for n in (0, 3, 6)]
    assert all(len(set(pair)) == 3 and ORIGINALS in pair for pair in pairs)
    assert (exposed.grade.outcome, len(forged.started)) == (Outcome.TAMPERED, 3)


async def test_originals_that_fail_in_a_later_pair_confirm_nothing() -> None:
    sandboxes = Sandboxes(
        lambda run: grade(F, P) if run == ORIGINALS and len(sandboxes.started) > 3 else honest(run)
    )
    found = (await verified(INSTANCE, 2, sandboxes.once)).grade

    assert (found.official, found.outcome) == (Outcome.RESOLVED, Outcome.UNRESOLVED)
    assert "failed in another run" in found.reason


@pytest.mark.parametrize(("fails", "hangs"), [(ADD, NEGATIVE), (NEGATIVE, ADD)])
async def test_a_run_that_fails_ends_the_others(fails: Twin, hangs: Twin) -> None:
    """The activity is retried, and no sandbox of this try may be left."""

    def lost(run: bytes) -> Grade:
        if fails.after in run:
            raise RetryHere("the sandbox is gone", boundary=Boundary.SANDBOX)
        return honest(run)

    sandboxes = Sandboxes(lost)
    sandboxes.hang = frozenset([with_twins(INSTANCE.grading.test_patch, [hangs])])
    with pytest.raises(RetryHere):
        await verified(INSTANCE, 1, sandboxes.once)

    assert sandboxes.at_work == 0


async def test_gold_whose_tests_depend_on_each_other_is_officially_resolved() -> None:
    """A twin that fails leaves something that a later test finds: only the run of originals counts."""
    sandboxes = Sandboxes(lambda run: grade(F, F) if ADD.after in run else honest(run))
    found = (await verified(INSTANCE, 1, sandboxes.once)).grade

    assert found.official is Outcome.RESOLVED
    assert follow_official_verdict(found).reward == 1.0


async def test_an_instance_without_twins_is_graded_once_and_says_so() -> None:
    async def once(instance: Instance) -> Graded:
        return Graded(grade(P, P), b"")

    found = await verified(tiny_instance(), 1, once)

    assert (found.grade.reward, len(found.runs)) == (1.0, 1)
    assert found.grade.verification is not None
    assert found.grade.verification.state == "unverified"
