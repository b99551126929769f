"""What the grades of a row's gold and base rollouts prove. Pure functions from grades to
findings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from perdure.graders.verdict_rules import F2P_PASSES, P2P_PASSES
from perdure.types import Grade, Grading, Outcome, TestStatus

Statuses = tuple[TestStatus, ...]
"""Statuses of one test in all runs of the same tree."""


@dataclass(frozen=True)
class Findings:
    """`reason` is empty if the row is proved."""

    reason: str
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)
    base_passes: bool | None = None


def findings(grading: Grading, gold: Sequence[Grade], base: Sequence[Grade]) -> Findings:
    """`gold` and `base`: at least one grade each, all of one row in one kind of sandbox."""
    if reason := _no_verdict(gold, base):
        return Findings(reason)
    if not grading.fail_to_pass:
        return _by_outcome(gold, base)
    passes = _base_passes(grading.pass_to_pass, base)
    return replace(_by_tests(grading, gold, base), base_passes=passes)


def _no_verdict(gold: Sequence[Grade], base: Sequence[Grade]) -> str:
    """Tests that time out, forged results and a diff that does not apply prove nothing."""
    for name, grades in (("`patch`", gold), ("the base without `patch`", base)):
        for grade in grades:
            if grade.outcome not in (Outcome.RESOLVED, Outcome.UNRESOLVED):
                return f"{name} is {grade.outcome}: {grade.reason}"
    return ""


def _by_outcome(gold: Sequence[Grade], base: Sequence[Grade]) -> Findings:
    """For rows without test lists, only the verdicts can be compared."""
    resolved = [grade.outcome is Outcome.RESOLVED for grade in gold]
    if not all(resolved):
        failed = next(grade for grade in gold if grade.outcome is not Outcome.RESOLVED)
        times = f"in {resolved.count(False)} of {len(gold)} runs"
        return Findings(f"`patch` does not resolve it {times}: {failed.reason}")
    if any(grade.outcome is Outcome.RESOLVED for grade in base):
        return Findings("the base without `patch` resolves it")
    return Findings("")


def _by_tests(grading: Grading, gold: Sequence[Grade], base: Sequence[Grade]) -> Findings:
    fixed: list[str] = []
    kept: list[str] = []
    dropped: dict[str, str] = {}
    for test in grading.fail_to_pass:
        with_gold, without = _runs(gold, test), _runs(base, test)
        if flaky := _flaky(with_gold, without, F2P_PASSES):
            dropped[test] = flaky
        elif with_gold[0] not in F2P_PASSES:
            return Findings(_unresolved(gold[0], f"FAIL_TO_PASS {test}", with_gold[0]))
        else:  # a test that the base passes too must still pass, but proves no fix
            (kept if without[0] in F2P_PASSES else fixed).append(test)
    for test in grading.pass_to_pass:
        with_gold, without = _runs(gold, test), _runs(base, test)
        if flaky := _flaky(with_gold, without, P2P_PASSES):
            dropped[test] = flaky
        elif with_gold[0] not in P2P_PASSES:
            return Findings(_unresolved(gold[0], f"PASS_TO_PASS {test}", with_gold[0]))
        else:
            kept.append(test)
    if not fixed:
        why = "; ".join(f"{test} {reason}" for test, reason in list(dropped.items())[:3])
        return Findings(f"no FAIL_TO_PASS test tells `patch` from the base {why}".strip())
    unexplained = [grade for grade in gold if grade.outcome is not Outcome.RESOLVED]
    if unexplained and not dropped:
        return Findings(f"`patch` does not resolve it: {unexplained[0].reason}")
    return Findings("", tuple(fixed), tuple(kept), dropped)


def _unresolved(grade: Grade, test: str, status: TestStatus) -> str:
    """The grade's reason says what the log has instead of a test that it lacks."""
    has_reason = status is TestStatus.MISSING and grade.reason
    return f"`patch` does not resolve it: {grade.reason if has_reason else f'{test} {status}'}"


def _runs(grades: Sequence[Grade], test: str) -> Statuses:
    return tuple(_status(grade, test) for grade in grades)


def _status(grade: Grade, test: str) -> TestStatus:
    return {**grade.pass_to_pass, **grade.fail_to_pass}.get(test, TestStatus.MISSING)


def _flaky(gold: Statuses, base: Statuses, passes: Iterable[TestStatus]) -> str:
    """Not empty if runs of the same tree disagree on whether the test passes."""
    for name, statuses in (("with `patch`", gold), ("without", base)):
        if len({status in passes for status in statuses}) > 1:
            return f"flaky {name}: {', '.join(statuses)}"
    return ""


def _base_passes(tests: Sequence[str], base: Sequence[Grade]) -> bool | None:
    if not tests:
        return None
    return all(_status(grade, test) in P2P_PASSES for grade in base for test in tests)
