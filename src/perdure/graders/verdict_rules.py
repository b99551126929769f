"""Turns statuses into a verdict: looks up published ids, applies each list's pass rule, computes
rewards.

It also gives the verdicts that all protocols share: the filter refused the patch, the patch does
not apply, or the provider killed the tests.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from perdure.graders.base import Grader
from perdure.graders.diff.patch_filter import FilteredPatch
from perdure.graders.hidden_test_run import Refusal, TestRun, last_lines
from perdure.sandboxes.base import ExecState
from perdure.types import Grade, Outcome, RewardForm, Rewards, TestStatus

ZERO = Rewards(binary=0.0)

F2P_PASSES = frozenset((TestStatus.PASSED, TestStatus.XFAIL))
P2P_PASSES = frozenset((TestStatus.PASSED, TestStatus.XFAIL, TestStatus.SKIPPED))

_GAVE_UP = {TestStatus.XFAIL: TestStatus.SKIPPED}

_ERROR = re.compile(r"(Error|Exception|\berror): ")

EvalType = Literal["pass_and_fail", "fail_only"]


class Score(NamedTuple):
    """The statuses of both lists, and the verdict that follows from them."""

    fail_to_pass: dict[str, TestStatus]
    pass_to_pass: dict[str, TestStatus]
    outcome: Outcome
    rewards: Rewards

    @property
    def reason(self) -> str:
        """The tests that failed, in one line; empty if RESOLVED."""
        failed = failing(self.fail_to_pass, self.pass_to_pass)
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        return "" if self.outcome is Outcome.RESOLVED else "; ".join(failed[:3]) + more


def failing(
    fail_to_pass: Mapping[str, TestStatus], pass_to_pass: Mapping[str, TestStatus]
) -> list[str]:
    """`FAIL_TO_PASS <test> <status>` of each test that should pass and does not."""
    failed = [f"FAIL_TO_PASS {test} {status}" for test, status in fail_to_pass.items() if status not in F2P_PASSES]  # fmt: skip
    failed += [f"PASS_TO_PASS {test} {status}" for test, status in pass_to_pass.items() if status not in P2P_PASSES]  # fmt: skip
    return failed


def score(
    statuses: Mapping[str, TestStatus],
    fail_to_pass: Iterable[str],
    pass_to_pass: Iterable[str],
    *,
    eval_type: EvalType = "pass_and_fail",
    may_xfail: bool = True,
) -> Score:
    """RESOLVED or UNRESOLVED, from the statuses of a run that is trusted.

    `may_xfail`: the hidden tests use xfail. Otherwise an xfail comes from code under test that
    calls `pytest.xfail()`, and counts as skipped.
    """
    f2p = {test: status_of(test, statuses) for test in fail_to_pass}
    p2p = {test: status_of(test, statuses) for test in pass_to_pass}
    if not may_xfail:
        f2p = {test: _GAVE_UP.get(status, status) for test, status in f2p.items()}
    f2p_passed = sum(_passes(status, F2P_PASSES, eval_type) for status in f2p.values())
    p2p_passed = sum(_passes(status, P2P_PASSES, eval_type) for status in p2p.values())
    resolved = bool(f2p) and f2p_passed == len(f2p) and p2p_passed == len(p2p)
    rewards = Rewards(
        binary=float(resolved),
        f2p_fraction=f2p_passed / len(f2p) if f2p else 0.0,
        p2p_fraction=p2p_passed / len(p2p) if p2p else 1.0,
        partial=(f2p_passed + p2p_passed) / (len(f2p) + len(p2p)) if f2p or p2p else 0.0,
    )
    return Score(f2p, p2p, Outcome.RESOLVED if resolved else Outcome.UNRESOLVED, rewards)


NAMES_SHOWN, NAME_LENGTH = 3, 80


def explain(score: Score, statuses: Mapping[str, TestStatus], last: str) -> str:
    """The tests that failed. If the log lacks one of them, also what it has: a wrong name in the list
    or a runner that did not start has no other sign. `last`: the log's last line."""
    absent = TestStatus.MISSING in (*score.fail_to_pass.values(), *score.pass_to_pass.values())
    if not absent or not score.reason:
        return score.reason
    names = ", ".join(repr(name[:NAME_LENGTH]) for name in list(statuses)[:NAMES_SHOWN])
    count = "1 test" if len(statuses) == 1 else f"{len(statuses)} tests"
    has = f"{count}, such as {names}" if names else "no test"
    return f"{score.reason}; the log has {has}; its last line: {last}"


def status_of(test: str, statuses: Mapping[str, TestStatus]) -> TestStatus:
    """The status of a published id; MISSING if the run has none, or several that disagree."""
    found = {statuses[name] for name in names_of(test, statuses)}
    if not found or (found & F2P_PASSES and found - F2P_PASSES):
        return TestStatus.MISSING
    return sorted(found)[0]


def names_of(test: str, statuses: Mapping[str, TestStatus]) -> list[str]:
    """The tests of a run that a published id names. An id with more `[` than `]` was cut at a
    space, so it names every test that begins with it.
    """
    if test in statuses or test.count("[") <= test.count("]"):
        return [test] if test in statuses else []
    return [name for name in statuses if name.startswith(test)]


def _passes(status: TestStatus, passes: frozenset[TestStatus], eval_type: EvalType) -> bool:
    if eval_type == "fail_only":
        return status not in (TestStatus.FAILED, TestStatus.ERROR)
    return status in passes


@dataclass(frozen=True)
class Verdict:
    """A protocol's result, from which `make_grade` makes a Grade."""

    outcome: Outcome
    reason: str = ""
    rewards: Rewards = ZERO
    score: Score | None = None
    named_rewards: Mapping[str, float] = field(default_factory=dict)
    reward_form: RewardForm = "binary"


def judge_filtered(filtered: FilteredPatch) -> Verdict | None:
    """The verdict if the filter has already decided; None if the tests must run. Tests also run for
    an empty patch, on the base."""
    if filtered.tampered:
        return Verdict(Outcome.TAMPERED, filtered.tampered)
    if filtered.unparsable:
        return Verdict(Outcome.UNPARSABLE, f"the diff cannot be parsed: {filtered.unparsable}")
    if filtered.refused:
        return Verdict(Outcome.APPLY_FAILED, filtered.refused)
    if not filtered.data and not filtered.was_empty:
        dropped = ", ".join(filtered.dropped_paths[:5])
        return Verdict(Outcome.EMPTY_PATCH, f"the filter dropped every file: {dropped}")
    return None


def judge_refusal(run: TestRun) -> Verdict:
    how = "git apply" if run.refusal is Refusal.DOES_NOT_APPLY else "conflicts with hidden tests"
    return Verdict(Outcome.APPLY_FAILED, f"{how}: {run.refusal_text}")


def judge_killed(run: TestRun) -> Verdict | None:
    """The verdict on tests that the provider killed; None if they ended by themselves.

    These are verdicts, not infrastructure failures: the sandbox is sized for the tests, so the code
    under test exhausted it or killed its runner. A retry would give hostile code more tries.
    """
    if run.status.state is not ExecState.KILLED:
        return None
    cause = run.status.cause
    if cause == "timeout":
        return Verdict(Outcome.TIMEOUT, "the tests exceeded their time limit")
    why = {
        "oom": "the tests exceeded the sandbox's memory limit",
        "output": "the tests exceeded the sandbox's output limit",
    }.get(cause or "", f"the test run was killed by signal {run.status.signal}")
    return Verdict(Outcome.UNRESOLVED, why)


def last_line(run: TestRun) -> str:
    lines = last_lines(run.log, 1)
    return lines[-1][:200] if lines else "no output"


def first_error(run: TestRun) -> str:
    """The first of the last 200 lines that names an error; the last line if none does."""
    found = (line for line in last_lines(run.log, 200) if _ERROR.search(line))
    return next(found, last_line(run)).removeprefix("E ").strip()[:200]


def make_grade(
    grader: Grader,
    verdict: Verdict,
    patch: bytes,
    filtered: FilteredPatch,
    run: TestRun | None = None,
) -> Grade:
    """The verdict, with everything that an audit needs."""
    score = verdict.score
    return Grade(
        outcome=verdict.outcome,
        reason=verdict.reason,
        rewards=verdict.rewards,
        reward_form=verdict.reward_form,
        named_rewards=dict(verdict.named_rewards),
        fail_to_pass=score.fail_to_pass if score else {},
        pass_to_pass=score.pass_to_pass if score else {},
        exit_code=run.status.code if run else None,
        seconds=(run.status.seconds or 0.0) if run else 0.0,
        dropped_paths=filtered.dropped_paths,
        flagged_paths=filtered.flagged_paths,
        patch_sha256=hashlib.sha256(patch).hexdigest(),
        grader=grader.name,
        grader_version=grader.version,
    )
