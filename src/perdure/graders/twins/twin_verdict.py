"""Combines the grades of a pair's runs into one: the row's own protocol judges the originals, and
the twins confirm that verdict or not."""

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


def is_decided(first: Ran) -> bool:
    """Whether a pair's second run could change neither the verdict nor the rewards."""
    if first.grade.outcome not in _RAN or not first.grade.fail_to_pass:
        return True  # tampered, timed out or killed: no test result counts
    return not first.run.twin_test_ids and first.grade.outcome is Outcome.UNRESOLVED


def unverified(grade: Grade, reason: str) -> Grade:
    """The grade of a single run, of an instance without twins."""
    checked = Verification(state="unverified", reason=reason)
    resolved = grade.outcome is Outcome.RESOLVED
    update = {"official": grade.outcome, "verification": checked if resolved else None}
    return grade.model_copy(update=update)


def combined(instance: Instance, runs: Sequence[Ran]) -> Grade:
    """The grade after one or more pairs, or after a single run that decided.

    `outcome` and `rewards` follow the verified verdict: a FAIL_TO_PASS test passes only if each of
    its originals passed and each of its twins failed.
    """
    official = _official(instance, runs)
    if official.outcome is not Outcome.RESOLVED:
        return official.model_copy(update={"official": official.outcome})
    twins = {test: status for ran in runs for test, status in _twins_of(ran).items()}
    if (doubt := _doubt(runs)) is not None:
        return _failed(official, runs, twins, doubt)
    without = [test for test in instance.grading.fail_to_pass if test not in twins]
    checked = Verification(
        state="unverified" if without else "verified",
        reason=f"no twin: {', '.join(without[:3])}" if without else "",
        twins=twins,
        runs=len(runs),
    )
    return official.model_copy(update={"official": Outcome.RESOLVED, "verification": checked})


def follow_official_verdict(grade: Grade) -> Grade:
    """The same grade for a request whose reward follows the official verdict."""
    if grade.official is not Outcome.RESOLVED or grade.outcome is Outcome.RESOLVED:
        return grade
    full = Rewards(binary=1.0, f2p_fraction=1.0, p2p_fraction=1.0, partial=1.0)
    update = {"outcome": Outcome.RESOLVED, "reason": "", "rewards": full}
    return grade.model_copy(update=update)


def _official(instance: Instance, runs: Sequence[Ran]) -> Grade:
    """The row's protocol on the first pair's originals and on the first run's PASS_TO_PASS."""
    first, *others = runs[:2]
    if first.grade.outcome not in _RAN or not others:
        return first.grade
    second = others[0]
    if second.grade.outcome not in _RAN and first.run.twin_test_ids:
        return second.grade  # its originals did not run to their end
    f2p = {
        test: (second if test in first.run.twin_test_ids else first).grade.fail_to_pass.get(
            test, TestStatus.MISSING
        )
        for test in instance.grading.fail_to_pass
    }
    grading = instance.grading
    p2p = dict.fromkeys(grading.pass_to_pass, TestStatus.MISSING) | first.grade.pass_to_pass
    score = verdict_rules.score(f2p | p2p, f2p, p2p, eval_type=grading.eval_type)
    return first.grade.model_copy(
        update={
            "outcome": score.outcome,
            "reason": score.reason,
            "rewards": score.rewards,
            "fail_to_pass": f2p,
            "pass_to_pass": p2p,
            "seconds": sum(ran.grade.seconds for ran in runs),
        }
    )


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
    if again := _originals_that_failed(runs[2:]):
        reason = f"FAIL_TO_PASS {again[0]} failed in a later run"
        return _Doubt("unverified", Outcome.UNRESOLVED, reason)
    return None


def _twins_of(ran: Ran) -> dict[str, TestStatus]:
    found = ran.grade.fail_to_pass
    return {test: found.get(test, TestStatus.MISSING) for test in sorted(ran.run.twin_test_ids)}


def _originals_that_failed(later: Sequence[Ran]) -> list[str]:
    return [
        test
        for ran in later
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
