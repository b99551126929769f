"""Reads a test run's log: one status per test id.

Rows name their parser `parse_log_...`. These are swebench's own, so verdicts equal swebench's.
`pytest` is Perdure's parser, for rows that name none: it keeps whole ids, and the worse of two
results counts. `verdict_rules.py` decides which statuses pass.

Hostile code writes the log, and swebench's regular expressions can take long on it. So parsers run
in `perdure.limited_process`, and read only the first 8 KiB of a line.
"""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from perdure.errors import InstanceError, MissingDependency
from perdure.installation import command_for_packages
from perdure.limited_process import Unparsable
from perdure.types import Instance, TestStatus

Statuses = dict[str, TestStatus]
Runner = Literal["pytest", "django", "sympy", ""]

OWN = "pytest"
"""Perdure's parser, the default for a row."""
LONGEST_LINE = 8 << 10
"""Bytes of a line that parsers read."""
PACKAGE = "swebench"

_BADNESS = (
    TestStatus.PASSED,
    TestStatus.XFAIL,
    TestStatus.SKIPPED,
    TestStatus.XPASS,
    TestStatus.MISSING,
    TestStatus.FAILED,
    TestStatus.ERROR,
)
_STATUSES = frozenset(_BADNESS)
_RANK = {status: rank for rank, status in enumerate(_BADNESS)}


def worst(statuses: Iterable[TestStatus]) -> TestStatus:
    return max(statuses, key=_RANK.__getitem__)


@dataclass(frozen=True)
class LogParser:
    """Reads the logs of one family of test runners. It can be pickled for another process."""

    name: str = OWN
    instance_id: str = ""
    version: str = ""
    """A few of swebench's parsers read the log differently for some instances or versions."""

    @property
    def runner(self) -> Runner:
        """The runner that writes these logs; empty if Perdure cannot add a test to its command."""
        if self.name == OWN:
            return "pytest"
        if _published()[self.name].__module__ != "swebench.harness.log_parsers.python":
            return ""
        return _OTHER_PYTHON.get(self.name, "pytest")

    def statuses(self, log: bytes) -> Statuses:
        """The status of every test that the log names. Raises: Unparsable."""
        text = _ENDS_OF_LONG_LINES.sub(rb"\1", log).decode("utf-8", "replace")
        return _own_statuses(text) if self.name == OWN else self._published_statuses(text)

    def _published_statuses(self, text: str) -> Statuses:
        from swebench.types import TestSpec

        spec = TestSpec(self.instance_id, "", [], "", self.version, [], [], self.name)
        try:
            found = _published()[self.name](text, spec)
        except MemoryError:
            raise
        except Exception as error:  # a log can make swebench's parsers raise anything
            raise Unparsable(f"{self.name}: {type(error).__name__}: {str(error)[:200]}") from error
        # A line such as pip's `ERROR: no such option` gives `ERROR:`, which is no test's status.
        return {test: TestStatus(said) for test, said in found.items() if said in _STATUSES}

    def rename(self, name: str) -> str:
        """Translate a test's name in junit to the name that this parser gives it."""
        if self.name == OWN:
            return name
        published = _published()
        parse = published[self.name]
        if parse is published["parse_log_pytest_v2"]:
            return " ".join(name.split())
        word = (name.split() or [""])[0]  # the other parsers end an id at its first space
        return _short_path(word) if parse is published["parse_log_pytest_options"] else word

    def ran(self, log: bytes) -> bool:
        """swebench's check for a log without results: whether a test suite says that it ran."""
        _published()
        from swebench.harness.grading import SUITE_RAN

        return bool(SUITE_RAN.search(log.decode("utf-8", "replace")))


def parser_of(instance: Instance) -> LogParser:
    """Raises: InstanceError naming the known parsers; MissingDependency."""
    name = instance.grading.log_parser
    if name != OWN and name not in _published():
        known = ", ".join([OWN, *sorted(_published())])
        raise InstanceError(
            f"{instance.ref}: unknown `log_parser` {name!r}: use one of {known}, "
            "or `eval_cmd` to grade by exit code"
        )
    version = instance.metadata.get("version")
    return LogParser(name, instance.instance_id, "" if version is None else str(version))


def published_names() -> list[str]:
    """Every name in swebench's table. Raises: MissingDependency."""
    return sorted(_published())


# --- swebench's parsers ---------------------------------------------------------------------------

_OTHER_PYTHON: dict[str, Runner] = {"parse_log_django": "django", "parse_log_sympy": "sympy"}
_ENDS_OF_LONG_LINES = re.compile(rb"([^\n]{%d})[^\n]+" % LONGEST_LINE)


@cache
def _published() -> dict[str, Callable[[str, Any], dict[str, str]]]:
    """swebench's table of parsers. A plain import of its package would load docker, modal and 1,500
    more modules. An empty `swebench.harness` package avoids this and does not affect the parsers.

    Raises: MissingDependency.
    """
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency(
            f"this `log_parser` needs the package swebench: {_how_to_install()}"
        ) from None
    place = importlib.util.find_spec(PACKAGE)
    if "swebench.harness" not in sys.modules and place and place.submodule_search_locations:
        hollow = ModuleType("swebench.harness")
        hollow.__path__ = [str(Path(place.submodule_search_locations[0]) / "harness")]
        sys.modules["swebench.harness"] = hollow
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError as error:
        raise MissingDependency(
            f"swebench {version} has no parsers that Perdure can use ({error}): {_how_to_install()}"
        ) from error
    return dict(PARSER_REGISTRY)


def _short_path(test: str) -> str:
    """`t[/home/me/a.txt]` -> `t[/a.txt]`, as `parse_log_pytest_options` does."""
    main, bracket, option = test.partition("[")
    option, closed, _ = option.rpartition("]")
    absolute = option.startswith("/") and not option.startswith("//") and "*" not in option
    if not (bracket and closed and absolute):
        return test
    return f"{main}[/{option.rsplit('/', 1)[-1]}]"


# --- Perdure's parser -----------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MARK = re.compile(r"PASSED|FAIL|ERROR|SKIPPED|XFAIL|XPASS|\x1b\[")
_STATUS = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) +(?!\[\d+\] )(\S.*)")


def _own_statuses(text: str) -> Statuses:
    """Reads pytest's `-rA` summary: `FAILED tests/a.py::test_b[x y] - message`. If the log names a
    test twice, the worse status counts. It takes time linear in the length of the log."""
    found: Statuses = {}
    for line in _lines(text):
        match = _STATUS.fullmatch(line.rstrip())
        if match is None:
            continue
        test, status = _without_message(match[2]), TestStatus(match[1])
        before = found.get(test)
        if before is None or _RANK[status] > _RANK[before]:
            found[test] = status
    return found


def failed_subtests(log: bytes) -> set[str]:
    """Tests of which a subtest failed. pytest logs such a test of unittest as `PASSED` and its subtest
    as `SUBFAILED(i=2) tests/a.py::C::test_b - message`, although its junit file says failed."""
    text = _ENDS_OF_LONG_LINES.sub(rb"\1", log).decode("utf-8", "replace")
    found = set()
    for line in _lines(text):
        _, is_subtest, rest = line.rstrip().partition("SUBFAIL")
        if is_subtest and (end := rest.find(".py::")) >= 0:
            found.add(_without_message(rest[rest.rfind(" ", 0, end) + 1 :]))
    return found


def _lines(text: str) -> Iterator[str]:
    """Lines with a status or a color, without colors. Skipping other lines is cheap."""
    end = -1
    while match := _MARK.search(text, end + 1):
        start = text.rfind("\n", end + 1, match.start()) + 1 or end + 1
        end = text.find("\n", match.end())
        end = len(text) if end < 0 else end
        line = text[start:end]
        yield _ANSI.sub("", line) if "\x1b[" in line else line


def _without_message(rest: str) -> str:
    """Cut ` - message`, except inside the brackets of a parametrized id."""
    opened, dash = rest.find("["), rest.find(" - ")
    if dash < 0:
        return rest
    if 0 <= opened < dash:
        closed = rest.find("] - ", opened)
        return rest[: closed + 1] if closed >= 0 else rest if rest.endswith("]") else rest[:dash]
    return rest[:dash]


def _how_to_install() -> str:
    """Without --no-deps, pip would install 80 packages."""
    return command_for_packages("--no-deps", "swebench==5.0.2", "unidiff")
