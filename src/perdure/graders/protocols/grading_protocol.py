"""The steps that all protocols share: filter the diff, apply it, run a command, judge the output.

A protocol's `plan` gives the command and the judge. This module gives the verdicts that all share.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

from perdure.graders.base import Graded
from perdure.graders.diff.patch_filter import filtered
from perdure.graders.hidden_test_run import Command, TestRun, run_tests, scratch_folder
from perdure.graders.verdict_rules import (
    Verdict,
    judge_filtered,
    judge_killed,
    judge_refusal,
    make_grade,
)
from perdure.limited_process import Unparsable
from perdure.sandboxes.base import Sandbox
from perdure.types import Instance, Outcome


@dataclass(frozen=True)
class Plan:
    """One run of the hidden tests."""

    command: Command
    judge: Callable[[TestRun], Awaitable[Verdict]]
    """Judges tests that ended by themselves. Raises: Unparsable."""


class ProtocolGrader(ABC):
    """A `Grader` whose protocol runs one command."""

    name: ClassVar[str]
    version: ClassVar[int]

    @abstractmethod
    def validate(self, instance: Instance) -> None:
        """Raises: InstanceError."""

    @abstractmethod
    def plan(self, instance: Instance, scratch: str) -> Plan:
        """What to run. `scratch` is the grader's own folder in the sandbox."""

    async def prepared(self, sandbox: Sandbox, instance: Instance) -> Instance:
        """Prepare the sandbox, or read from it, before filtering. Raises: InstanceError."""
        return instance

    def kept(self, run: TestRun) -> tuple[bytes, bytes | None]:
        """The log and the junit file to store with the grade."""
        return run.log, run.junit

    async def grade(
        self, sandbox: Sandbox, instance: Instance, patch: bytes, *, timeout_s: float
    ) -> Graded:
        """Raises: InstanceError, RetryHere, SandboxLost."""
        self.validate(instance)
        instance = await self.prepared(sandbox, instance)
        kept = await filtered(patch, instance)
        if (early := judge_filtered(kept)) is not None:
            return Graded(make_grade(self, early, patch, kept), b"")
        scratch = scratch_folder(sandbox)
        plan = self.plan(instance, scratch)
        run = await run_tests(
            sandbox, instance, kept.data, plan.command, scratch=scratch, timeout_s=timeout_s
        )
        return Graded(make_grade(self, await _judged(plan, run), patch, kept, run), *self.kept(run))


async def _judged(plan: Plan, run: TestRun) -> Verdict:
    if run.refusal is not None:
        return judge_refusal(run)
    if (ended := judge_killed(run)) is not None:
        return ended
    try:
        return await plan.judge(run)
    except Unparsable as error:
        return Verdict(Outcome.UNPARSABLE, f"the tests' output cannot be parsed: {error}")
