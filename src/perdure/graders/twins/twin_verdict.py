"""Combines the grades of a grading's runs into one: a run of originals gives the official verdict,
and the other runs confirm it or not."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from perdure.graders import verdict_rules
from perdure.graders.twins.twin_draw import Run
from perdure.types import Grade, Instance, Outcome, Rewards, TestStatus, Verification

_RAN = (Outcome.RESOLVED, Outcome.UNRESOLVED)
_FAILING = frozenset((TestStatus.FAILED, TestStatus.ERROR))
_PASSING = frozenset((TestStatus.PASSED, TestStatus.XFAIL, TestStatus.XPASS))


class Ran(NamedTuple):
    """A run, and the grade that the row's grader gave it."""

    run: Run
    grade: Grade


def unverified(grade: Grade, reason: str) -> Grade:
    """The grade of a single run, of an instance without twins."""
    checked = Verification(state="unverified", reason=reason)
    resolved = grade.outcome is Outcome.RESOLVED
    update = {"official": grade.outcome, "verification": checked if resolved else None}
    return grade.model_copy(update=update)


def combined(instance: Instance, runs: Sequence[Ran]) -> Grade:
    """The grade of all runs of a grading. The first has originals only: it is the row's own
    protocol, and its grade is the official verdict.

    `outcome` and `rewards` follow the verified verdict: also the other originals passed, and each
    twin failed.
    """
    official = runs[0].grade
    if official.outcome is not Outcome.RESOLVED:
        return official.model_copy(update={"official": official.outcome})
    twins = {test: status for ran in runs for test, status in _twins_of(ran).items()}
    if (doubt := _doubt(runs)) is not None:
        return _failed(official, runs, twins, doubt)
    checked = _checked(instance, runs).model_copy(update={"twins": twins, "runs": len(runs)})
    return official.model_copy(update={"official": Outcome.RESOLVED, "verification": checked})


def _checked(instance: Instance, runs: Sequence[Ran]) -> Verification:
    drawn = [twin for ran in runs for twin in ran.run.twins]
    having = {test for twin in drawn for test in twin.tests}
    if without := [test for test in instance.grading.fail_to_pass if test not in having]:
        return Verification(state="unverified", reason=f"no twin: {', '.join(without[:3])}")
    if weak := [twin for twin in drawn if twin.weak]:
        reason = f"a reader could recognize the twin of {weak[0].tests[0]}"
        return Verification(state="weak", reason=reason)
    return Verification(state="verified")


def follow_official_verdict(grade: Grade) -> Grade:
    """The same grade for a request whose reward follows the official verdict."""
    if grade.official is not Outcome.RESOLVED or grade.outcome is Outcome.RESOLVED:
        return grade
    full = Rewards(binary=1.0, f2p_fraction=1.0, p2p_fraction=1.0, partial=1.0)
    update = {"outcome": Outcome.RESOLVED, "reason": "", "rewards": full}
    return grade.model_copy(update=update)


def _doubt(runs: Sequence[Ran]) -> "_Doubt | None":
    for ran in runs:
        if ran.grade.outcome not in _RAN:
            return _Doubt("unverified", ran.grade.outcome, ran.grade.reason)
        wrong = {test: s for test, s in _twins_of(ran).items() if s not in _FAILING}
        if passed := [test for test, status in wrong.items() if status in _PASSING]:
            reason = f"the twin of {passed[0]} passed: a test that must fail did not"
            return _Doubt("exposed", Outcome.TAMPERED, reason)
        if wrong:
            test = next(iter(wrong))
            reason = f"the twin of {test} is {wrong[test]}: {ran.grade.reason}"
            return _Doubt("unverified", Outcome.UNRESOLVED, reason)
    if again := [test for ran in runs for test in _originals_that_failed(ran)]:
        reason = f"FAIL_TO_PASS {again[0]} failed in another run"
        return _Doubt("unverified", Outcome.UNRESOLVED, reason)
    return None


def _twins_of(ran: Ran) -> dict[str, TestStatus]:
    found = ran.grade.fail_to_pass
    return {test: found.get(test, TestStatus.MISSING) for test in sorted(ran.run.twin_test_ids)}


def _originals_that_failed(ran: Ran) -> list[str]:
    return [
        test
        for test, status in ran.grade.fail_to_pass.items()
        if test not in ran.run.twin_test_ids and status not in verdict_rules.F2P_PASSES
    ]


class _Doubt(NamedTuple):
    """Why the twins do not confirm an officially resolved patch."""

    state: Literal["exposed", "unverified"]
    outcome: Outcome
    reason: str


def _failed(
    official: Grade, runs: Sequence[Ran], twins: dict[str, TestStatus], doubt: _Doubt
) -> Grade:
    checked = Verification(state=doubt.state, reason=doubt.reason, twins=twins, runs=len(runs))
    return official.model_copy(
        update={
            "outcome": doubt.outcome,
            "reason": doubt.reason,
            "rewards": verdict_rules.ZERO,
            "official": Outcome.RESOLVED,
            "verification": checked,
        }
    )
