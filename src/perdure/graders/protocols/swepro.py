"""Grades as SWE-bench Pro does: the row's script runs the tests, and its parser names those that
passed.

The publisher runs the parser in the sandbox, where code under test can replace its result. Here
`row_parser` runs it on the worker. The row's script decides what runs, so Perdure cannot add a
canary: without twins, code under test that prints false results is trusted.
"""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from perdure.errors import InstanceError
from perdure.graders import verdict_rules
from perdure.graders.hidden_test_run import Command, TestRun
from perdure.graders.protocols import row_parser
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.reports.log_parsers import LogParser, Statuses
from perdure.graders.verdict_rules import Verdict
from perdure.limited_process import read
from perdure.types import Instance, OutputParser

_STDERR = b"\n--- stderr ---\n"


class SweproGrader(ProtocolGrader):
    name: ClassVar[str] = "swepro"
    version: ClassVar[int] = 1

    def validate(self, instance: Instance) -> None:
        """Raises: InstanceError; MissingDependency without bubblewrap."""
        row_parser.check()
        grading = instance.grading
        if grading.parser is None:
            raise InstanceError(f"{instance.ref}: lacks its run script and its parser")
        if not grading.fail_to_pass:
            raise InstanceError(f"{instance.ref}: lacks `fail_to_pass`: list the tests to fix")

    def plan(self, instance: Instance, scratch: str) -> Plan:
        grading = instance.grading
        assert grading.parser is not None
        program = grading.parser.program

        async def judged(run: TestRun) -> Verdict:
            found = await read(row_parser.parse_output, program, run.log, run.junit or b"")
            score = verdict_rules.score(found, grading.fail_to_pass, grading.pass_to_pass)
            reason = verdict_rules.explain(score, found, verdict_rules.last_line(run))
            return Verdict(score.outcome, reason, score.rewards, score)

        return Plan(command(grading.parser, scratch), judged)

    def kept(self, run: TestRun) -> tuple[bytes, bytes | None]:
        return both_streams(run), None


def both_streams(run: TestRun) -> bytes:
    """stdout, then stderr, in one log."""
    return run.log + (_STDERR + run.junit if run.junit else b"")


@dataclass(frozen=True)
class RowParser(LogParser):
    """Reads `both_streams` of a calibration run, which is not hostile, with the row's program."""

    program: str = ""

    def statuses(self, log: bytes) -> Statuses:
        stdout, _, stderr = log.partition(_STDERR)
        return row_parser.parse_output(self.program, stdout, stderr)


def command(parser: OutputParser, scratch: str) -> Command:
    """Returns stderr in place of a junit file, because the parser needs both streams."""
    stderr = f"{scratch}/stderr.log"
    lines = [f"exec 2>{shlex.quote(stderr)}", f"set -- {shlex.quote(parser.arguments)}", parser.run]
    return Command("\n".join(lines), {}, junit_path=stderr)
