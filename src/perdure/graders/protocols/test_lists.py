"""Grades by lists, as SWE-bench does: FAIL_TO_PASS must pass, PASS_TO_PASS must still pass."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from perdure.errors import InstanceError
from perdure.graders import forged_results, verdict_rules
from perdure.graders.diff.git_diff_parser import MalformedDiff, parse
from perdure.graders.forged_results import CanaryTest, Reading
from perdure.graders.hidden_test_run import TestRun, run_tests, scratch_folder
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.reports.junit_statuses import JunitReport, UnusableJunit, parse_junit
from perdure.graders.reports.log_parsers import (
    LogParser,
    Statuses,
    failed_subtests,
    parser_of,
)
from perdure.graders.reports.session_completion import find_truncation
from perdure.graders.verdict_rules import Verdict, last_line
from perdure.limited_process import read
from perdure.sandboxes.base import Sandbox
from perdure.types import Grading, Instance, Outcome, TestStatus

Rules = TypeVar("Rules")


@dataclass(frozen=True)
class SuiteRun:
    """A run of the row's guarded test command."""

    run: TestRun
    canary: CanaryTest | None
    """None if Perdure cannot add a test to this log parser's runner."""
    writes_junit: bool
    parser: LogParser = field(default_factory=LogParser)


class SwebenchGrader(ProtocolGrader):
    name: ClassVar[str] = "swebench"
    version: ClassVar[int] = 2

    def validate(self, instance: Instance) -> None:
        """Raises: InstanceError."""
        validate_suite(instance)
        if not instance.grading.fail_to_pass:
            raise InstanceError(
                f"{instance.ref}: lacks `FAIL_TO_PASS`: list the tests that the fix makes pass, "
                "or give an `eval_cmd` to grade by exit code"
            )

    def plan(self, instance: Instance, scratch: str) -> Plan:
        return planned(instance, scratch, judge, instance.grading)


def planned(
    instance: Instance, scratch: str, judge: Callable[[SuiteRun, Rules], Verdict], rules: Rules
) -> Plan:
    """The row's guarded test command; `judge` reads its output in another process."""
    command, canary = forged_results.instrument_command(instance.grading, scratch)
    parser = parser_of(instance)

    async def judged(run: TestRun) -> Verdict:
        return await read(judge, SuiteRun(run, canary, bool(command.junit_path), parser), rules)

    return Plan(command, judged)


def validate_suite(instance: Instance) -> None:
    """Check that the hidden tests can run. The lists may be missing, because calibration computes
    them.

    Raises: InstanceError naming the field and the fix.
    """
    grading = instance.grading
    if not grading.test_cmd:
        raise InstanceError(
            f"{instance.ref}: lacks `test_cmd`: add the command that runs its tests"
        )
    try:
        parse(grading.test_patch)
    except MalformedDiff as error:
        raise InstanceError(f"{instance.ref}: `test_patch` is not a git diff: {error}") from error
    parser_of(instance)
    forged_results.instrument_command(grading, scratch="/tmp")


async def run_suite(
    sandbox: Sandbox, instance: Instance, patch: bytes, *, timeout_s: float
) -> SuiteRun:
    """Run the row's guarded test command on the base tree with `patch`, which is already filtered.

    Raises: InstanceError, RetryHere, SandboxLost.
    """
    scratch = scratch_folder(sandbox)
    command, canary = forged_results.instrument_command(instance.grading, scratch)
    run = await run_tests(sandbox, instance, patch, command, scratch=scratch, timeout_s=timeout_s)
    return SuiteRun(run, canary, bool(command.junit_path), parser_of(instance))


def reading_of(suite: SuiteRun) -> Reading:
    """Parse the output of a finished run. Hostile code wrote it: call this through `read`.

    Raises: Unparsable.
    """
    statuses = suite.parser.statuses(suite.run.log)
    if suite.canary is None:
        return Reading(None, TestStatus.MISSING, statuses, None)
    canary_status, statuses = suite.canary.take(statuses)
    junit = _junit(suite.run, suite.parser) if suite.writes_junit else None
    if junit is not None:
        failed = {suite.parser.rename(test) for test in failed_subtests(suite.run.log)}
        statuses |= dict.fromkeys(failed & statuses.keys(), TestStatus.FAILED)
    return Reading(suite.canary, canary_status, statuses, junit)


def _junit(run: TestRun, parser: LogParser) -> JunitReport:
    """The junit report; empty if the file is absent or unusable, so it confirms no test."""
    try:
        return parse_junit(run.junit or b"", parser.rename)
    except UnusableJunit:
        return JunitReport({}, parser.rename)


def invalid_by_protocol(suite: SuiteRun, statuses: Statuses) -> str:
    """Why swebench 5 would reject this run; empty if it would not. Its rules are in
    `get_logs_eval`: a run without results must say that it ran, and only a failed test explains an
    exit code."""
    if not statuses and not suite.parser.ran(suite.run.log):
        return f"the log has no test result and no sign that tests ran: {last_line(suite.run)}"
    failed = {TestStatus.FAILED, TestStatus.ERROR} & set(statuses.values())
    if statuses and suite.run.status.code and not failed:
        return f"exit code {suite.run.status.code}, although no test failed"
    return ""


def judge(suite: SuiteRun, grading: Grading) -> Verdict:
    """The verdict on a finished run. Call this through `read`."""
    reading = reading_of(suite)
    code = suite.run.status.code
    score = verdict_rules.score(
        reading.statuses,
        grading.fail_to_pass,
        grading.pass_to_pass,
        eval_type=grading.eval_type,
        may_xfail=b"xfail" in grading.test_patch.lower(),
    )
    if suite.canary is None:
        invalid = invalid_by_protocol(suite, reading.statuses)
        reason = invalid or verdict_rules.explain(score, reading.statuses, last_line(suite.run))
        outcome = Outcome.UNRESOLVED if invalid else score.outcome
        return Verdict(outcome, reason, verdict_rules.ZERO if invalid else score.rewards, score)
    passed = any(status in verdict_rules.F2P_PASSES for status in reading.statuses.values())
    claims = code == 0 or (passed and score.outcome is Outcome.RESOLVED)
    if reading.canary_status is TestStatus.MISSING and not claims:
        # The run ended early without success: the diff broke collection or crashed the runner.
        reason = f"the test run ended early (exit code {code}): {last_line(suite.run)}"
        return Verdict(Outcome.UNRESOLVED, reason, score=score)
    tests = (*grading.fail_to_pass, *grading.pass_to_pass)
    if forged := forged_results.find_forgery(reading, code, tests):
        return Verdict(Outcome.TAMPERED, forged, score=score)
    if (
        score.outcome is Outcome.RESOLVED
        and suite.parser.runner
        and (cut := find_truncation(grading.log_parser, suite.run.log, code, tests))
    ):
        return Verdict(Outcome.TAMPERED, cut, score=score)
    reason = verdict_rules.explain(score, reading.statuses, last_line(suite.run))
    return Verdict(score.outcome, reason, score.rewards, score)
