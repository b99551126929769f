"""Detects forged test results: by a canary test, and by comparing the log with the junit file.

The canary is a test with a random name that must fail, in the same invocation as the hidden tests.
If code forges all results (by a hook, a patched runner or an early exit), the canary passes or is
missing.
"""

import hashlib
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from secrets import token_hex

from perdure.errors import InstanceError
from perdure.graders.canary_insertion import insert_canary
from perdure.graders.diff.git_diff_parser import paths_of
from perdure.graders.hidden_test_run import Command
from perdure.graders.reports.junit_statuses import JunitReport
from perdure.graders.reports.log_parsers import LogParser, Runner, Statuses, worst
from perdure.graders.verdict_rules import F2P_PASSES, names_of
from perdure.types import Grading, TestStatus

_FAILING = frozenset((TestStatus.FAILED, TestStatus.ERROR))


@dataclass(frozen=True)
class CanaryTest:
    """The test that must fail. Every runner's test id contains its name."""

    name: str
    path: str
    content: bytes

    def take(self, statuses: Statuses) -> tuple[TestStatus, Statuses]:
        """The canary's status (MISSING if the run lacks it), and the statuses of all other tests."""
        mine = {test: status for test, status in statuses.items() if self.name in test}
        others = {test: status for test, status in statuses.items() if test not in mine}
        return worst(mine.values()) if mine else TestStatus.MISSING, others


@dataclass(frozen=True)
class Reading:
    """The parsed output of a finished run. `junit` is None for runners that write no junit file,
    `canary` for runners to which Perdure cannot add a test."""

    canary: CanaryTest | None
    canary_status: TestStatus
    statuses: Statuses
    junit: JunitReport | None


def instrument_command(grading: Grading, scratch: str) -> tuple[Command, CanaryTest | None]:
    """The row's test command with a canary and, if the runner can write one, a junit file. For
    languages other than Python, a canary that calibration has proven is part of the test patch, and
    the command is unchanged.

    Raises: InstanceError when the command does not call the log parser's runner.
    """
    command = (grading.test_cmd or "").rstrip().rstrip(";")
    before, newline, line = command.rpartition("\n")
    runner = LogParser(grading.log_parser).runner
    if not runner:
        return _with_inserted_canary(command, grading)
    add = _ADD[runner]
    suffix, canary, junit = add(line, grading, f"{scratch}/{token_hex(8)}.xml")
    shell = f"{before}{newline}{line} {suffix}"
    return Command(shell, {canary.path: canary.content}, junit), canary


def _with_inserted_canary(command: str, grading: Grading) -> tuple[Command, CanaryTest | None]:
    made = insert_canary(grading.test_patch) if grading.canary else None
    if made is None:
        return Command(command, {}), None
    canary = CanaryTest(made.token, made.path, made.content)
    return Command(command, {}, test_patch=made.test_patch), canary


def find_forgery(reading: Reading, exit_code: int | None, tests: Iterable[str]) -> str | None:
    """Why a finished run is `tampered`; None if it is trusted. A difference counts only if the log
    is *better* than junit, because the other direction cannot raise a score.
    """
    canary, junit = reading.canary, reading.junit
    if canary is None:
        return None
    if reading.canary_status not in _FAILING:
        return f"canary {reading.canary_status}: a test that must fail did not"
    if exit_code == 0:
        return "exit code 0 although the canary failed"
    if junit is None:
        return None
    if junit.get(f"{canary.path}::{canary.name}") not in _FAILING:
        return "junit: a test that must fail did not"
    for test in tests:
        for name in names_of(test, reading.statuses):
            said, written = reading.statuses[name], junit.get(name)
            if said in F2P_PASSES and written not in F2P_PASSES:
                return f"log and junit disagree on {name}: {said} and {written}"
    return None


# --- one function per runner: (words to append, the canary, the path of the junit file) ---------

_Added = tuple[str, CanaryTest, str]

_PYTEST_CALL = re.compile(r"(?:^|[\s/;&])(?:pytest|py\.test|tox)(?:\s|$)")
_TAKES_VALUE = frozenset(  # pytest's options with a separate value
    [
        "-c",
        "-k",
        "-m",
        "-p",
        "-o",
        "-W",
        "-n",
        "--ignore",
        "--ignore-glob",
        "--deselect",
        "--rootdir",
        "--confcutdir",
        "--basetemp",
        "--durations",
        "--tb",
        "--cov",
        "--maxfail",
    ]
)


def _pytest(line: str, grading: Grading, junit: str) -> _Added:
    if not _PYTEST_CALL.search(line):
        raise InstanceError(
            "`test_cmd` must end in a call of pytest for this `log_parser` "
            f"{grading.log_parser!r}, got {line!r}; use `eval_cmd` to grade by exit code"
        )
    words = _words(line)
    named = [_file_of(word) for word in _arguments(words) if "/" in word or ".py" in word]
    folder = _folder(named, grading)
    canary = _canary(folder, _keywords(words), "def {name}():\n    assert {check}\n")
    # Without paths, pytest collects by its configuration. An added path would then be the only one.
    path = shlex.quote(canary.path) if named else ""
    suffix = f"-rA -o junit_family=xunit1 --junitxml={shlex.quote(junit)} {path}"
    return suffix.rstrip(), canary, junit


def _sympy(line: str, grading: Grading, junit: str) -> _Added:
    named = [_file_of(word) for word in _words(line) if word.endswith(".py") and "/" in word]
    canary = _canary(_folder(named, grading), "", "def {name}():\n    assert {check}\n")
    return shlex.quote(canary.path), canary, ""


def _django(line: str, grading: Grading, junit: str) -> _Added:
    """Test labels are modules below tests/: `admin_views.tests` -> `admin_views.test_<canary>`."""
    label = next((w for w in reversed(_words(line)) if re.fullmatch(r"[a-z_]\w*(\.\w+)*", w)), "")
    app = label.split(".")[0]
    if not app:
        raise InstanceError(f"`test_cmd` names no django test label, such as app.tests: {line!r}")
    content = "import unittest\n\n\nclass Test(unittest.TestCase):\n    def {name}(self):\n        assert {check}\n"
    canary = _canary(f"tests/{app}", "", content)
    return f"{app}.{posixpath.basename(canary.path).removesuffix('.py')}", canary, ""


_ADD: dict[Runner, Callable[[str, Grading, str], _Added]] = {
    "pytest": _pytest,
    "django": _django,
    "sympy": _sympy,
}


def _canary(folder: str, keywords: str, template: str) -> CanaryTest:
    """A test that fails because a digest differs, so its text does not reveal that it must fail."""
    seed, name = token_hex(8), f"test_{keywords}{token_hex(5)}"
    wrong = hashlib.sha256(f"not {seed}".encode()).hexdigest()[:16]
    check = f'__import__("hashlib").sha256(b"{seed}").hexdigest()[:16] == "{wrong}"'
    path = posixpath.normpath(posixpath.join(folder, f"{name}.py"))
    return CanaryTest(name, path, template.format(name=name, check=check).encode())


def _folder(named: list[str], grading: Grading) -> str:
    """The folder of the first test, so that its configuration also applies to the canary."""
    if named:
        return posixpath.dirname(named[0]) if named[0].endswith(".py") else named[0]
    paths = [path.decode("utf-8", "replace") for path in sorted(paths_of(grading.test_patch))]
    tests = [path for path in paths if re.fullmatch(r"test.*\.py|.*_test\.py", path.rsplit("/", 1)[-1])]  # fmt: skip
    return posixpath.dirname(tests[0]) if tests else "."


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise InstanceError(f"`test_cmd` is not a shell line: {error}") from error


def _arguments(words: list[str]) -> list[str]:
    """Words after the runner's name that are neither options nor an option's value."""
    runners = [n for n, word in enumerate(words) if _PYTEST_CALL.search(word)]
    found = []
    skip = False
    for word in words[runners[-1] + 1 if runners else 0 :]:
        if not skip and not word.startswith("-"):
            found.append(word)
        skip = word in _TAKES_VALUE
    return found


def _file_of(word: str) -> str:
    return word.split("::", 1)[0].rstrip("/")


def _keywords(words: list[str]) -> str:
    """A prefix for the canary's name, because `-k EXPRESSION` selects tests by name."""
    for option, value in pairwise(words):
        if option == "-k":
            wanted = re.sub(r"\bnot\s+\w+", "", value)
            names = [w for w in re.findall(r"\w+", wanted) if w not in ("and", "or", "not")]
            return f"{names[0]}_" if names else ""
    return ""
