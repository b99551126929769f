"""The linear parsers give what SWE-bench's published expressions give, on any log of their words.

The expressions stand here as they are published; hostile input makes them take for ever.
"""

import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.graders.log_parsers import PARSERS, Statuses, worst
from perdure.types import TestStatus

Results = Iterator[tuple[str, TestStatus]]

WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
PIECES = [
    *WORDS.split("|"), " ", "  ", "\n", "\n", "\n", "\t", "\r", "é", "\u2003", "x", "::", "a::b", "tests/a.py::test_b", "[x - y]", " - ",
    "[ 50%]", "[12] ", "[1", "]", "%]", "\x1b[32m", "\x1b[0m", "\x1b[", "ok", "ok\n", "\nok\n", "test_x", "test_y ", " (app.C)", " ... ",
    "FAIL: ", "ERROR: ", "skipped 'x'", "expected failure", " ... Testing against Django installed in ", " silenced).",
    " ... System check identified no issues (0 silenced)", " ... Internal Server Error: /", "/", "_", "__ ", " ___", "a.py:t", ".py:", " F", " E", "[OK]", "[FAIL]",
]  # fmt: skip
SILENCED = re.compile(
    r"^(.*?) \.\.\. (?:Testing against Django installed in (?:(?!\n\S+ \.\.\. )[\s\S])*? silenced\)\."
    r"|Internal Server Error: /.*/|System check identified no issues \(0 silenced\))\nok$",
    re.MULTILINE,
)


def _old_lines(log: str) -> Results:
    old = re.compile(rf"(\S+::.*?) ({WORDS})(?: +\[ *\d+%\])?")
    for line in log.split("\n"):
        if match := old.fullmatch(line.strip()):
            yield match[1], TestStatus(match[2])


def _silenced(log: str) -> Results:
    for match in SILENCED.finditer(log):
        yield match[1], TestStatus.PASSED


def _sympy(log: str) -> Results:
    for file, test in re.findall(r"^_+ (.*)\.py:(.*) _+$", log, re.MULTILINE):
        yield f"{file}.py:{test}", TestStatus.FAILED
    endings = {" ok": TestStatus.PASSED, " F": TestStatus.FAILED, " E": TestStatus.ERROR}
    for line in log.split("\n"):
        text = re.sub(r"\s*\[(?:OK|FAIL)\]$", "", line.strip())
        for ending, status in endings.items():
            if text.startswith("test_") and text.endswith(ending):
                yield text.split()[0], status


@pytest.mark.parametrize(
    ("parser", "published"),
    [("pytest_v2", _old_lines), ("django", _silenced), ("sympy", _sympy)],
    ids=["pytest_v2", "django", "sympy"],
)
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
def test_finds_what_the_published_expressions_find(
    parser: str, published: Callable[[str], Results], pieces: list[str]
) -> None:
    """Every result of an expression is found, and no status is better than its own."""
    log = "".join(pieces)
    found = PARSERS[parser].statuses(log.encode())

    expected: Statuses = {}
    for test, status in published(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", log)):
        expected[test] = worst((expected.get(test, status), status))
    assert {test: worst((found[test], status)) for test, status in expected.items()} == {
        test: found[test] for test in expected
    }
