"""From a test run's log to one status per test id, under SWE-bench's names for parsers and ids. If
a log names a test twice, the worse status counts. `verdict.py` decides what a status is worth.

Hostile code writes the log, so the time is linear in its length: only lines that hold one of a
parser's marks are looked at, of a line only the first 8 KiB, and no expression can backtrack far.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from perdure.errors import InstanceError
from perdure.types import TestStatus

Statuses = dict[str, TestStatus]

LONGEST_LINE = 8 << 10
"""Bytes of a line that are read."""

_BADNESS = (
    TestStatus.PASSED,
    TestStatus.XFAIL,
    TestStatus.SKIPPED,
    TestStatus.XPASS,
    TestStatus.MISSING,
    TestStatus.FAILED,
    TestStatus.ERROR,
)
_RANK = {status: rank for rank, status in enumerate(_BADNESS)}


def worst(statuses: Iterable[TestStatus]) -> TestStatus:
    return max(statuses, key=_RANK.__getitem__)


class Line(NamedTuple):
    """A line of the log, without ANSI colours. Undecodable bytes become U+FFFD, never an error."""

    text: str
    start: int
    end: int
    """Where it lies in the log: the next line starts at `end` + 1."""


@dataclass(frozen=True)
class LogParser:
    """How one family of test runners reports."""

    marks: re.Pattern[bytes]
    """What every line holds that means something: a fixed word, or the start of a colour."""
    parse: Callable[[Iterator[Line]], Iterator[tuple[str, TestStatus]]]
    """Gets the lines with a mark, in order."""
    rename: Callable[[str], str] = str
    """Removes what differs between machines from an id; junit's names pass through it too."""

    def statuses(self, log: bytes) -> Statuses:
        """Every test the log names."""
        found: Statuses = {}
        for name, status in self.parse(_marked(log, self.marks)):
            test = self.rename(name)
            before = found.get(test)
            if before is None or _RANK[status] > _RANK[before]:
                found[test] = status
        return found


def _marked(log: bytes, marks: re.Pattern[bytes]) -> Iterator[Line]:
    end = -1
    while match := marks.search(log, end + 1):
        start = log.rfind(b"\n", end + 1, match.start()) + 1 or end + 1
        end = log.find(b"\n", match.end())
        end = len(log) if end < 0 else end
        line = log[start : min(end, start + LONGEST_LINE)]
        if b"\x1b[" in line:
            line = _ANSI.sub(b"", line)
        yield Line(line.decode("utf-8", "replace"), start, end)


def parser_named(name: str) -> LogParser:
    """Raises: InstanceError listing the known parsers."""
    short = name.removeprefix("parse_log_")
    if short not in PARSERS:
        known = ", ".join(sorted(PARSERS))
        raise InstanceError(f"unknown `log_parser` {name!r}: use one of {known}")
    return PARSERS[short]


_COLOUR = rb"\x1b\["
_ANSI = re.compile(_COLOUR + rb"[0-9;]*[A-Za-z]")
_STATUS = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) +(?!\[\d+\] )(\S.*)")
_STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")


def _marks(*words: str) -> re.Pattern[bytes]:
    """Also lines with colours, which may stand inside a word."""
    return re.compile(b"|".join([*(re.escape(word.encode()) for word in words), _COLOUR]))


def _pytest(lines: Iterator[Line]) -> Iterator[tuple[str, TestStatus]]:
    """The `-rA` summary: `FAILED tests/a.py::test_b[x y] - message`. Ids keep their spaces."""
    for line in lines:
        yield from _in_summary(line.text)


def _in_summary(text: str) -> Iterator[tuple[str, TestStatus]]:
    if match := _STATUS.fullmatch(text.rstrip()):
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


def _pytest_v2(lines: Iterator[Line]) -> Iterator[tuple[str, TestStatus]]:
    """Also lines of old releases: `tests/a.py::test_b PASSED  [ 50%]`."""
    for line in lines:
        yield from _in_summary(line.text)
        test, space, status = _without_progress(line.text.strip()).rpartition(" ")
        if space and status in _STATUSES and _is_id(test):
            yield test, TestStatus(status)


def _without_progress(text: str) -> str:
    if not text.endswith("%]"):
        return text
    before, opened, percent = text[:-2].rpartition("[")
    shorter = before.rstrip(" ")
    is_progress = opened and percent.lstrip(" ").isdecimal() and len(shorter) < len(before)
    return shorter if is_progress else text


def _is_id(test: str) -> bool:
    """Before the first `::` is a path without spaces."""
    path = test[: test.find("::", 1)] if "::" in test[1:] else ""
    return bool(path) and not any(map(str.isspace, path))


def _short_paths(test: str) -> str:
    """`t[/home/me/a.txt]` -> `t[/a.txt]`: parameters that are absolute paths differ by machine."""
    main, bracket, option = test.partition("[")
    option, closed, after = option.rpartition("]")
    absolute = option.startswith("/") and not option.startswith("//") and "*" not in option
    if not (bracket and closed and absolute):
        return test
    return f"{main}[/{option.rsplit('/', 1)[-1]}]{after}"


_SYMPY_ENDINGS = {" ok": TestStatus.PASSED, " F": TestStatus.FAILED, " E": TestStatus.ERROR}


def _sympy(lines: Iterator[Line]) -> Iterator[tuple[str, TestStatus]]:
    """`test_x ok|F|E`, and the headings of tracebacks: `___ sympy/a/tests/test_b.py:test_x ___`."""
    for line in lines:
        text = line.text.strip()
        if heading := _heading(line.text):
            yield heading, TestStatus.FAILED
        if text.endswith(("[OK]", "[FAIL]")):
            text = text[: text.rindex("[")].rstrip()
        for ending, status in _SYMPY_ENDINGS.items():
            if text.startswith("test_") and text.endswith(ending):
                yield text.split(None, 1)[0], status


def _heading(text: str) -> str:
    """What stands between two lines of underscores, if it names a file and a test."""
    inner = text.strip("_")
    framed = text.startswith("_") and text.endswith("_") and inner[:1] == inner[-1:] == " "
    file, between, test = inner[1:-1].rpartition(".py:")
    return f"{file}.py:{test}" if framed and between else ""


_UNITTEST_ENDINGS = {"ok": TestStatus.PASSED, "OK": TestStatus.PASSED, "FAIL": TestStatus.FAILED, "ERROR": TestStatus.ERROR, "expected failure": TestStatus.XFAIL}  # fmt: skip


def _django(lines: Iterator[Line]) -> Iterator[tuple[str, TestStatus]]:
    """unittest's verbose lines: `test_x (app.tests.Case) ... ok`, also when other output interrupts
    them."""
    previous = ""
    talk = _SetUpTalk()
    for whole in lines:
        yield from talk.passed(whole)
        line = whole.text.strip()
        if line.startswith(("FAIL: ", "ERROR: ")):
            kind, _, test = line.partition(": ")
            yield test.split(None, 1)[0], TestStatus.FAILED if kind == "FAIL" else TestStatus.ERROR
        elif " ... " in line:
            test, _, said = line.rpartition(" ... ")
            previous = line.partition(" ... ")[0]
            if said.startswith("skipped"):
                yield previous, TestStatus.SKIPPED
            elif said.strip() in _UNITTEST_ENDINGS:
                yield test.strip(), _UNITTEST_ENDINGS[said.strip()]
        elif line.startswith("ok") and previous:
            yield previous, TestStatus.PASSED
    yield from talk.left()


class _SetUpTalk:
    """Tests whose `ok` stands alone on a line, after what django said meanwhile: one line of a check,
    or the lines from `Testing against Django` to `silenced).`."""

    _BEGINS = " ... Testing against Django installed in "
    _ENDS = " silenced)."
    _CHECKED = " ... System check identified no issues (0 silenced)"
    _ERROR = " ... Internal Server Error: /"

    def __init__(self) -> None:
        self._open: str | None = None
        """The test whose long talk goes on."""
        self._inside: list[str] = []
        """Tests of one line since then. They belong to the long talk, if it comes to its end."""
        self._said: str | None = None
        """The test whose talk ended with the line before."""
        self._all_said = False
        """It was a long talk."""
        self._next = -1

    def passed(self, line: Line) -> Iterator[tuple[str, TestStatus]]:
        if self._said is not None and line.start == self._next and line.text == "ok":
            yield from self._closed(self._said)
        self._said, self._next = None, line.end + 1
        if self._open is not None and re.match(r"\S+ \.\.\. ", line.text):
            yield from self.left()
        self._look_at(line.text)

    def left(self) -> Iterator[tuple[str, TestStatus]]:
        """A long talk that has no end was none."""
        yield from ((test, TestStatus.PASSED) for test in self._inside)
        self._open, self._inside = None, []

    def _closed(self, test: str) -> Iterator[tuple[str, TestStatus]]:
        if self._all_said:
            self._open, self._inside = None, []
        if self._open is None:
            yield test, TestStatus.PASSED
        else:
            self._inside.append(test)

    def _look_at(self, text: str) -> None:
        rest = text
        if self._open is None and self._BEGINS in text:
            self._open, _, rest = text.partition(self._BEGINS)
        self._all_said = self._open is not None and rest.endswith(self._ENDS)
        test, error, place = text.partition(self._ERROR)
        if self._all_said:
            self._said = self._open
        elif text.endswith(self._CHECKED):
            self._said = text.removesuffix(self._CHECKED)
        elif error and place.endswith("/"):
            self._said = test


_RESULTS = _marks(*_STATUSES)
_PLAIN = LogParser(_RESULTS, _pytest)
_OPTIONS = LogParser(_RESULTS, _pytest, rename=_short_paths)
_V2 = LogParser(_RESULTS, _pytest_v2)

PARSERS: dict[str, LogParser] = {
    **dict.fromkeys(("pytest", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"), _PLAIN),
    **dict.fromkeys(("pytest_options", "pydicom", "pylint", "requests"), _OPTIONS),
    **dict.fromkeys(("pytest_v2", "astropy", "scikit", "sphinx"), _V2),
    "django": LogParser(_marks(" ... ", "FAIL: ", "ERROR: ", "ok", "silenced)."), _django),
    "sympy": LogParser(_marks("test_", ".py:"), _sympy),
}  # fmt: skip
"""Known parsers; rows may write `parse_log_` before the name."""
