"""Grades by one command, run in the workdir: exit code 0 means resolved.

This is the weakest protocol. It does not check that other tests still pass, and it has no canary:
without a test patch that calibration could make twins of, code under test that exits early with 0
counts as resolved. If a row has test lists, use `swebench`.
"""

from typing import ClassVar

from perdure.errors import InstanceError
from perdure.graders import verdict_rules
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.hidden_test_run import Command, TestRun
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.reports.log_parsers import Statuses
from perdure.graders.verdict_rules import Verdict, last_line
from perdure.types import Instance, Outcome, TestStatus

EXIT_CODE = "exit code"
"""The id of the only test."""


class EvalCmdGrader(ProtocolGrader):
    name: ClassVar[str] = "eval_cmd"
    version: ClassVar[int] = 1

    def validate(self, instance: Instance) -> None:
        """Raises: InstanceError."""
        if not instance.grading.eval_cmd:
            raise InstanceError(
                f"{instance.ref}: lacks `eval_cmd`: add a shell line whose exit code 0 means solved"
            )
        filter_patch(b"", instance)  # reads the row's own diffs

    def plan(self, instance: Instance, scratch: str) -> Plan:
        return Plan(Command(instance.grading.eval_cmd or "", {}), _judge)


def statuses(code: int | None) -> Statuses:
    return {EXIT_CODE: TestStatus.PASSED if code == 0 else TestStatus.FAILED}


async def _judge(run: TestRun) -> Verdict:
    found = verdict_rules.score(statuses(run.status.code), (EXIT_CODE,), ())
    failed = f"exit code {run.status.code}: {last_line(run)}"
    reason = "" if found.outcome is Outcome.RESOLVED else failed
    return Verdict(found.outcome, reason, found.rewards, found)
