"""From a test run's log to one status per test id.

Rows name their parser `parse_log_...`: these are swebench's own, so that a verdict is its verdict.
`pytest` is Perdure's, for rows that name none: it keeps ids whole, and the worse of two results
counts. `verdict.py` decides what a status is worth.

Hostile code writes the log. swebench's expressions can take long on such a log, so they run in the
limited process of `untrusted`, and of a line only the first 8 KiB are read.
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
"""Perdure's parser, and the default of a row."""
LONGEST_LINE = 8 << 10
"""Bytes of a line that are read."""
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
    """How one family of test runners reports. It may be sent to another process."""

    name: str = OWN
    instance_id: str = ""
    version: str = ""
    """A few of swebench's parsers read the log differently for some instances or versions."""

    @property
    def runner(self) -> Runner:
        """The runner whose log this is, if Perdure knows how to add a test to its command."""
        if self.name == OWN:
            return "pytest"
        if _published()[self.name].__module__ != "swebench.harness.log_parsers.python":
            return ""
        return _OTHER_PYTHON.get(self.name, "pytest")

    def statuses(self, log: bytes) -> Statuses:
        """Every test that the log names. Raises: Unparsable."""
        text = _ENDS_OF_LONG_LINES.sub(rb"\1", log).decode("utf-8", "replace")
        return _own_statuses(text) if self.name == OWN else self._published_statuses(text)

    def _published_statuses(self, text: str) -> Statuses:
        from swebench.types import TestSpec

        spec = TestSpec(self.instance_id, "", [], "", self.version, [], [], self.name)
        try:
            found = _published()[self.name](text, spec)
        except MemoryError:
            raise
        except Exception as error:  # the log decides what an expression of theirs trips over
            raise Unparsable(f"{self.name}: {type(error).__name__}: {str(error)[:200]}") from error
        # A line such as pip's `ERROR: no such option` gives the status `ERROR:`: no test's.
        return {test: TestStatus(said) for test, said in found.items() if said in _STATUSES}

    def rename(self, name: str) -> str:
        """A test's name in junit as this parser writes it."""
        if self.name == OWN:
            return name
        published = _published()
        parse = published[self.name]
        if parse is published["parse_log_pytest_v2"]:
            return " ".join(name.split())
        word = (name.split() or [""])[0]  # the others end an id at its first space
        return _short_path(word) if parse is published["parse_log_pytest_options"] else word

    def ran(self, log: bytes) -> bool:
        """swebench's own test for a log without results: whether a suite says that it ran."""
        _published()
        from swebench.harness.grading import SUITE_RAN

        return bool(SUITE_RAN.search(log.decode("utf-8", "replace")))


def parser_of(instance: Instance) -> LogParser:
    """Raises: InstanceError naming the parsers that are known; MissingDependency."""
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
    """swebench's table of parsers. Importing its package as usual would import docker, modal and
    1,500 more modules; a package without code in their place leaves the parsers as they are.

    Raises: MissingDependency.
    """
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency(
            f"this `log_parser` is one of the package swebench: {_how_to_install()}"
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
_MARK = re.compile(r"PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|\x1b\[")
_STATUS = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) +(?!\[\d+\] )(\S.*)")


def _own_statuses(text: str) -> Statuses:
    """The `-rA` summary: `FAILED tests/a.py::test_b[x y] - message`. If a log names a test twice,
    the worse status counts. The time is linear in the length of the log."""
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


def _lines(text: str) -> Iterator[str]:
    """Lines with a status or a colour, without the colours: 64 MB of other lines cost little."""
    end = -1
    while match := _MARK.search(text, end + 1):
        start = text.rfind("\n", end + 1, match.start()) + 1 or end + 1
        end = text.find("\n", match.end())
        end = len(text) if end < 0 else end
        line = text[start:end]
        yield _ANSI.sub("", line) if "\x1b[" in line else line


def _without_message(rest: str) -> str:
    """Cut ` - message`; inside the brackets of a parametrised id that text is part of the id."""
    opened, dash = rest.find("["), rest.find(" - ")
    if dash < 0:
        return rest
    if 0 <= opened < dash:
        closed = rest.find("] - ", opened)
        return rest[: closed + 1] if closed >= 0 else rest if rest.endswith("]") else rest[:dash]
    return rest[:dash]


def _how_to_install() -> str:
    """Without --no-deps it brings 80 packages."""
    return command_for_packages("--no-deps", "swebench==5.0.2", "unidiff")
