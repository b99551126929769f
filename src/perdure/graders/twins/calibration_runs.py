"""Runs the row's own test command for calibration, on gold and on the base, with added files."""

import base64
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, ParamSpec, TypeVar

from perdure.errors import InstanceError
from perdure.graders import forged_results
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.hidden_test_run import Command, TestRun, run_tests, scratch_folder
from perdure.graders.protocols import eval_cmd, multi_swe, swepro
from perdure.graders.protocols.test_lists import SuiteRun
from perdure.graders.reports.log_parsers import LogParser, Statuses, parser_of
from perdure.instances.calibration_proof import MakeSandbox
from perdure.limited_process import Unparsable, read
from perdure.types import Instance

P = ParamSpec("P")
T = TypeVar("T")


class Bench:
    """Runs the tests of one instance, and counts the sandboxes that it used."""

    def __init__(self, instance: Instance, make_sandbox: MakeSandbox, limit_s: float) -> None:
        self.instance = instance
        self.gold = filter_patch(instance.gold_patch, instance).data
        self.runs = 0
        self._make = make_sandbox
        self._limit_s = limit_s

    @property
    def by_exit_code(self) -> bool:
        """Whether the row has one exit code in place of a status per test."""
        return self.instance.grading.protocol == "eval_cmd"

    async def run(
        self,
        patch: bytes,
        purpose: str,
        files: dict[str, bytes] | None = None,
        instance: Instance | None = None,
    ) -> SuiteRun:
        instance = instance or self.instance
        self.runs += 1
        async with await self._make(f"twins-{purpose}") as sandbox:
            scratch = scratch_folder(sandbox)
            suite = _suite(instance, scratch)
            files = {**(files or {}), **suite.command.extra_files}
            command = replace(suite.command, extra_files=files)
            run = await run_tests(
                sandbox, instance, patch, command, scratch=scratch, timeout_s=self._limit_s
            )
        return suite.ran(run)

    async def read_files(self, paths: Sequence[str]) -> dict[str, bytes]:
        """The contents of those files that exist on gold with the hidden tests in place."""
        lines = [f'printf "%s\\n" "$(base64 -w0 -- {shlex.quote(path)})"' for path in paths]
        answers = (await self.in_sandbox("sources", "\n".join(lines))).split(b"\n")
        return {p: base64.b64decode(a) for p, a in zip(paths, answers, strict=False) if a}

    async def in_sandbox(self, purpose: str, script: str) -> bytes:
        """The output of a script, run on gold with the hidden tests in place."""
        command = Command(script, {})
        self.runs += 1
        async with await self._make(f"twins-{purpose}") as sandbox:
            scratch = scratch_folder(sandbox)
            run = await run_tests(
                sandbox, self.instance, self.gold, command, scratch=scratch, timeout_s=300
            )
        return run.log

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await read(function, *args, **kwargs)
        except Unparsable as error:
            raise InstanceError(
                f"{self.instance.ref}: the tests' output cannot be parsed: {error}"
            ) from error


class _Suite(NamedTuple):
    """The command of a row's tests, and how to read its run. Tracebacks use Python's own style: for
    any other style, pytest parses the whole file for each traceback."""

    command: Command
    ran: Callable[[TestRun], SuiteRun]


def _suite(instance: Instance, scratch: str) -> _Suite:
    """Raises: InstanceError."""
    if instance.grading.protocol == "swepro":
        return _of_swepro(instance, scratch)
    if instance.grading.protocol == "multi_swe":
        return _of_multi_swe(instance)
    if instance.grading.protocol == "eval_cmd":
        command = Command(instance.grading.eval_cmd or "", {})
        return _Suite(
            command, lambda run: SuiteRun(run, None, False, ExitCode(code=run.status.code))
        )
    command, canary = forged_results.instrument_command(instance.grading, scratch)
    has_junit, parser = bool(command.junit_path), parser_of(instance)
    shell = command.shell + (" --tb=native" if has_junit else "")
    return _Suite(
        replace(command, shell=shell), lambda run: SuiteRun(run, canary, has_junit, parser)
    )


@dataclass(frozen=True)
class ExitCode(LogParser):
    """Reads no log: the exit code is the only test."""

    code: int | None = None

    def statuses(self, log: bytes) -> Statuses:
        return eval_cmd.statuses(self.code)


_NATIVE = "export PYTEST_ADDOPTS=--tb=native\n"


def _of_multi_swe(instance: Instance) -> _Suite:
    """As `_of_swepro`, with the publisher's parser. Styles in its scripts are replaced."""
    parser = multi_swe.PublishedParser(instance.grading.log_parser)
    own = re.sub(r"--tb=\w+", "--tb=native", instance.grading.test_cmd or "")
    edit = "sed -i 's/--tb=[a-z]*/--tb=native/g' /home/fix-run.sh 2>/dev/null\n"
    command = Command(f"{_NATIVE}{edit}{own}", {})
    return _Suite(command, lambda run: SuiteRun(run, None, False, parser))


def _of_swepro(instance: Instance, scratch: str) -> _Suite:
    """The row's script chooses its runner. A variable sets the traceback style of pytest."""
    assert instance.grading.parser is not None
    program = instance.grading.parser.program
    command = swepro.command(instance.grading.parser, scratch)
    shell = f"{_NATIVE}{command.shell}"

    def ran(run: TestRun) -> SuiteRun:
        both = replace(run, log=swepro.both_streams(run), junit=None)
        return SuiteRun(both, None, False, swepro.RowParser(program=program))

    return _Suite(replace(command, shell=shell), ran)
