"""Grades by one command, run in the workdir: exit code 0 means resolved.

This is the weakest protocol. It has no canary, so code under test that exits early with 0 counts as
resolved. It does not check that other tests still pass. If a row has test lists, use `swebench`.
"""

from typing import ClassVar

from perdure.errors import InstanceError
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.hidden_test_run import Command, TestRun
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.verdict_rules import Verdict, last_line
from perdure.types import Instance, Outcome, Rewards


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


async def _judge(run: TestRun) -> Verdict:
    if run.status.code == 0:
        won = Rewards(binary=1.0, f2p_fraction=1.0, p2p_fraction=1.0, partial=1.0)
        return Verdict(Outcome.RESOLVED, rewards=won)
    return Verdict(Outcome.UNRESOLVED, f"exit code {run.status.code}: {last_line(run)}")
