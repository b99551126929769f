"""Grades as Multi-SWE-bench does, in three stages: the base, the base with tests, and both with the
fix. The row holds the results of the first two. The publisher's own parser for the repository reads
the logs.

A test counts as fixed only if it passes in the third stage; a skipped test has not passed. Tests
that passed in an earlier stage may be missing, but none may fail.
"""

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from perdure.errors import InstanceError, MissingDependency
from perdure.graders import verdict_rules
from perdure.graders.hidden_test_run import Command, TestRun
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.reports.log_parsers import LogParser, Statuses
from perdure.graders.verdict_rules import Verdict, last_line
from perdure.installation import command_for_packages
from perdure.limited_process import Unparsable, read
from perdure.types import Grading, Instance, Outcome, TestStatus

PACKAGE = "multi-swe-bench"
LARGEST_LOG = 16 << 20
"""The publisher's regular expressions read at most this many bytes, the last of the log."""


class MultiSweGrader(ProtocolGrader):
    name: ClassVar[str] = "multi_swe"
    version: ClassVar[int] = 1

    def validate(self, instance: Instance) -> None:
        """Raises: InstanceError; MissingDependency without the publisher's package."""
        grading = instance.grading
        if not grading.test_cmd or not grading.fail_to_pass:
            raise InstanceError(
                f"{instance.ref}: lacks the test command, or a test that the fix makes pass"
            )
        try:
            importlib.metadata.version(PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            raise MissingDependency(
                f"reading the logs of {instance.ref} needs the package {PACKAGE}: "
                f"{command_for_packages('--no-deps', 'multi-swe-bench==1.1.2')} and "
                f"{command_for_packages('dataclasses-json', 'unidiff')}"
            ) from None

    def plan(self, instance: Instance, scratch: str) -> Plan:
        grading = instance.grading

        async def judged(run: TestRun) -> Verdict:
            return judge(await read(parsed, grading.log_parser, run.log), grading, last_line(run))

        return Plan(Command(grading.test_cmd or "", {}), judged)


def judge(found: Statuses, grading: Grading, last: str = "") -> Verdict:
    """The verdict on the third stage."""
    if not found:
        return Verdict(Outcome.UNRESOLVED, f"the log has no test result: {last}")
    score = verdict_rules.score(found, grading.fail_to_pass, grading.pass_to_pass)
    broken = [test for test in grading.must_not_fail if found.get(test) is TestStatus.FAILED]
    if broken:
        reason = f"{len(broken)} tests that had passed now fail, such as {broken[0]}"
        kept = score.pass_to_pass | dict.fromkeys(broken, TestStatus.FAILED)
        return Verdict(Outcome.UNRESOLVED, reason, score=score._replace(pass_to_pass=kept))
    reason = verdict_rules.explain(score, found, last)
    return Verdict(score.outcome, reason, score.rewards, score)


@dataclass(frozen=True)
class PublishedParser(LogParser):
    """Reads the log of a calibration run, whose code is not hostile, with the publisher's class."""

    def statuses(self, log: bytes) -> Statuses:
        return parsed(self.name, log)


def parsed(repository: str, log: bytes) -> Statuses:
    """The publisher's results for `owner/name`. Call this through `read`. Raises: Unparsable."""
    text = log[-LARGEST_LOG:].decode("utf-8", "replace")
    try:
        result = _parser(repository).parse_log(text)
    except (MemoryError, InstanceError):
        raise
    except Exception as error:  # a log can make the publisher's parser raise anything
        raise Unparsable(f"{PACKAGE}: {type(error).__name__}: {str(error)[:200]}") from error
    passed = dict.fromkeys(result.passed_tests, TestStatus.PASSED)
    return passed | dict.fromkeys(result.failed_tests, TestStatus.FAILED)


@cache
def _parser(repository: str) -> Any:
    """The publisher's class for a repository. The whole package would import 2,000 modules, so this
    loads only the one that registers the repository. Raises: InstanceError."""
    spec = importlib.util.find_spec("multi_swe_bench")
    assert spec is not None
    assert spec.submodule_search_locations
    harness = Path(spec.submodule_search_locations[0]) / "harness"
    hollow = ModuleType("multi_swe_bench.harness")
    hollow.__path__ = [str(harness)]
    sys.modules.setdefault("multi_swe_bench.harness", hollow)
    owner, _, name = repository.partition("/")
    mark = re.compile(rf'@Instance\.register\(\s*"{re.escape(owner)}",\s*"{re.escape(name)}"\s*\)')
    for path in sorted((harness / "repos").rglob("*.py")):
        if mark.search(path.read_text(errors="replace")):
            return _made(path, owner, name)
    raise InstanceError(
        f"{PACKAGE} has no parser for {repository!r}: update it, or exclude the row"
    )


def _made(path: Path, owner: str, name: str) -> Any:
    module = importlib.util.spec_from_file_location("perdure_multi_swe_parser", path)
    assert module is not None
    assert module.loader is not None
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    made = loaded.Instance._registry[f"{owner}/{name}"]
    return made(SimpleNamespace(org=owner, repo=name, number=0), SimpleNamespace())
