"""From a test run's log to one status per test id, under SWE-bench's names for parsers and ids. If
a log names a test twice, the worse status counts. `verdict.py` decides what a status is worth.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from perdure.errors import InstanceError
from perdure.types import TestStatus

Statuses = dict[str, TestStatus]

_BADNESS = (
    TestStatus.PASSED,
    TestStatus.XFAIL,
    TestStatus.SKIPPED,
    TestStatus.XPASS,
    TestStatus.MISSING,
    TestStatus.FAILED,
    TestStatus.ERROR,
)


def worst(statuses: Iterable[TestStatus]) -> TestStatus:
    return max(statuses, key=_BADNESS.index)


@dataclass(frozen=True)
class LogParser:
    """How one family of test runners reports."""

    parse: Callable[[str], Iterator[tuple[str, TestStatus]]]
    rename: Callable[[str], str] = str
    """Removes what differs between machines from an id; junit's names pass through it too."""

    def statuses(self, log: bytes) -> Statuses:
        """Every test the log names. Undecodable bytes become U+FFFD, never an error."""
        found: Statuses = {}
        for name, status in self.parse(_ANSI.sub("", log.decode("utf-8", "replace"))):
            test = self.rename(name)
            found[test] = worst((found.get(test, status), status))
        return found


def parser_named(name: str) -> LogParser:
    """Raises: InstanceError listing the known parsers."""
    short = name.removeprefix("parse_log_")
    if short not in PARSERS:
        known = ", ".join(sorted(PARSERS))
        raise InstanceError(f"unknown `log_parser` {name!r}: use one of {known}")
    return PARSERS[short]


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PYTEST = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) +(?!\[\d+\] )(\S.*)")
_PYTEST_OLD = re.compile(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: +\[ *\d+%\])?")
_DJANGO_SKIP_OK = re.compile(
    r"^(.*?) \.\.\. (?:Testing against Django installed in (?:(?!\n\S+ \.\.\. )[\s\S])*? silenced\)\."
    r"|Internal Server Error: /.*/|System check identified no issues \(0 silenced\))\nok$",
    re.MULTILINE,
)


def _pytest(log: str) -> Iterator[tuple[str, TestStatus]]:
    """The `-rA` summary: `FAILED tests/a.py::test_b[x y] - message`. Ids keep their spaces."""
    for line in log.split("\n"):
        if match := _PYTEST.fullmatch(line.rstrip()):
            yield _without_message(match[2]), TestStatus(match[1])


def _without_message(rest: str) -> str:
    """Cut ` - message`; inside the brackets of a parametrised id that text is part of the id."""
    opened, dash = rest.find("["), rest.find(" - ")
    if dash < 0:
        return rest
    if 0 <= opened < dash:
        closed = rest.find("] - ", opened)
        return rest[: closed + 1] if closed >= 0 else rest if rest.endswith("]") else rest[:dash]
    return rest[:dash]


def _pytest_v2(log: str) -> Iterator[tuple[str, TestStatus]]:
    """Also lines of old releases: `tests/a.py::test_b PASSED`."""
    yield from _pytest(log)
    for line in log.split("\n"):
        if match := _PYTEST_OLD.fullmatch(line.strip()):
            yield match[1], TestStatus(match[2])


def _short_paths(test: str) -> str:
    """`t[/home/me/a.txt]` -> `t[/a.txt]`: parameters that are absolute paths differ by machine."""
    main, bracket, option = test.partition("[")
    option, closed, after = option.rpartition("]")
    absolute = option.startswith("/") and not option.startswith("//") and "*" not in option
    if not (bracket and closed and absolute):
        return test
    return f"{main}[/{option.rsplit('/', 1)[-1]}]{after}"


_SYMPY_ENDINGS = {" ok": TestStatus.PASSED, " F": TestStatus.FAILED, " E": TestStatus.ERROR}


def _sympy(log: str) -> Iterator[tuple[str, TestStatus]]:
    """`test_x ok|F|E`, and the headings of tracebacks: `___ sympy/a/tests/test_b.py:test_x ___`."""
    for file, test in re.findall(r"^_+ (.*)\.py:(.*) _+$", log, re.MULTILINE):
        yield f"{file}.py:{test}", TestStatus.FAILED
    for line in log.split("\n"):
        text = re.sub(r"\s*\[(?:OK|FAIL)\]$", "", line.strip())
        for ending, status in _SYMPY_ENDINGS.items():
            if text.startswith("test_") and text.endswith(ending):
                yield text.split()[0], status


_UNITTEST_ENDINGS = {"ok": TestStatus.PASSED, "OK": TestStatus.PASSED, "FAIL": TestStatus.FAILED, "ERROR": TestStatus.ERROR, "expected failure": TestStatus.XFAIL}  # fmt: skip


def _django(log: str) -> Iterator[tuple[str, TestStatus]]:
    """unittest's verbose lines: `test_x (app.tests.Case) ... ok`, also when other output interrupts
    them."""
    previous = ""
    for line in map(str.strip, log.split("\n")):
        if line.startswith(("FAIL: ", "ERROR: ")):
            kind, _, test = line.partition(": ")
            yield test.split()[0], TestStatus.FAILED if kind == "FAIL" else TestStatus.ERROR
        elif " ... " in line:
            test, _, said = line.rpartition(" ... ")
            previous = line.split(" ... ")[0]
            if said.startswith("skipped"):
                yield previous, TestStatus.SKIPPED
            elif said.strip() in _UNITTEST_ENDINGS:
                yield test.strip(), _UNITTEST_ENDINGS[said.strip()]
        elif line.startswith("ok") and previous:
            yield previous, TestStatus.PASSED
    for match in _DJANGO_SKIP_OK.finditer(log):
        yield match[1], TestStatus.PASSED


_PLAIN = LogParser(_pytest)
_OPTIONS = LogParser(_pytest, rename=_short_paths)
_V2 = LogParser(_pytest_v2)

PARSERS: dict[str, LogParser] = {
    **dict.fromkeys(("pytest", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"), _PLAIN),
    **dict.fromkeys(("pytest_options", "pydicom", "pylint", "requests"), _OPTIONS),
    **dict.fromkeys(("pytest_v2", "astropy", "scikit", "sphinx"), _V2),
    "django": LogParser(_django),
    "sympy": LogParser(_sympy),
}  # fmt: skip
"""Known parsers; rows may write `parse_log_` before the name."""
