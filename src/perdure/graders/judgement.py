"""Verdicts that every protocol shares: the patch was refused, does not apply, or the provider
killed the tests."""

import hashlib
import re
from dataclasses import dataclass

from perdure.graders import verdict
from perdure.graders.base import Grader
from perdure.graders.diff.patch import FilteredPatch
from perdure.graders.test_run import Refusal, TestRun, last_lines
from perdure.sandboxes.base import ExecState
from perdure.types import Grade, Outcome, Rewards

_ERROR = re.compile(r"(Error|Exception|\berror): ")


@dataclass(frozen=True)
class Judgement:
    """A verdict before it becomes a Grade."""

    outcome: Outcome
    reason: str = ""
    rewards: Rewards = verdict.ZERO
    score: verdict.Score | None = None


def judge_filtered(filtered: FilteredPatch) -> Judgement | None:
    """The verdict if the filter has already decided. An empty patch is run on the base."""
    if filtered.tampered:
        return Judgement(Outcome.TAMPERED, filtered.tampered)
    if filtered.unparsable:
        return Judgement(Outcome.UNPARSABLE, f"the diff: {filtered.unparsable}")
    if filtered.refused:
        return Judgement(Outcome.APPLY_FAILED, filtered.refused)
    if not filtered.data and not filtered.was_empty:
        dropped = ", ".join(filtered.dropped_paths[:5])
        return Judgement(Outcome.EMPTY_PATCH, f"nothing left after dropping {dropped}")
    return None


def judge_refusal(run: TestRun) -> Judgement:
    how = "git apply" if run.refusal is Refusal.DOES_NOT_APPLY else "conflicts with hidden tests"
    return Judgement(Outcome.APPLY_FAILED, f"{how}: {run.refusal_text}")


def judge_killed(run: TestRun) -> Judgement | None:
    """The verdict on tests that were ended from outside; None if they ended by themselves. These
    are verdicts, not infrastructure failures: the sandbox is sized for the tests, so the code under
    test exhausted it or killed its runner. A retry would let hostile code wait for a lucky run.
    """
    if run.status.state is not ExecState.KILLED:
        return None
    cause = run.status.cause
    if cause == "timeout":
        return Judgement(Outcome.TIMEOUT, "the tests ran into their time limit")
    why = {
        "oom": "the tests exceeded the sandbox's memory limit",
        "output": "the tests exceeded the sandbox's output limit",
    }.get(cause or "", f"the test run was killed by signal {run.status.signal}")
    return Judgement(Outcome.UNRESOLVED, why)


def last_line(run: TestRun) -> str:
    lines = last_lines(run.log, 1)
    return lines[-1][:200] if lines else "no output"


def first_error(run: TestRun) -> str:
    """The first of the last lines that names an error; the last one where none does."""
    found = (line for line in last_lines(run.log, 200) if _ERROR.search(line))
    return next(found, last_line(run)).removeprefix("E ").strip()[:200]


def make_grade(
    grader: Grader,
    judgement: Judgement,
    patch: bytes,
    filtered: FilteredPatch,
    run: TestRun | None = None,
) -> Grade:
    """The verdict with everything needed to audit it."""
    score = judgement.score
    return Grade(
        outcome=judgement.outcome,
        reason=judgement.reason,
        rewards=judgement.rewards,
        fail_to_pass=score.fail_to_pass if score else {},
        pass_to_pass=score.pass_to_pass if score else {},
        exit_code=run.status.code if run else None,
        seconds=(run.status.seconds or 0.0) if run else 0.0,
        dropped_paths=filtered.dropped_paths,
        flagged_paths=filtered.flagged_paths,
        signals=filtered.signals,
        patch_sha256=hashlib.sha256(patch).hexdigest(),
        grader=grader.name,
        grader_version=grader.version,
    )
