"""Calibration reads from a run the exception and the line at which each copy of a test failed."""

from perdure.graders.hidden_test_run import TestRun
from perdure.graders.protocols.test_lists import SuiteRun
from perdure.graders.reports.log_parsers import parser_of
from perdure.graders.twins.copied_tests import Copy, with_copies
from perdure.graders.twins.failure_locations import NOT_RUN, behaviours
from perdure.graders.twins.parsed_test_file import Source
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.testing.grader_contract import tiny_instance
from perdure.types import TestStatus

TEXT = "class T:\n    def test_x(self):\n        y = 1\n        assert y == 2\n"
SOURCE = Source("a/tests/test_b.py", TEXT.encode(), frozenset((4,)))
TWIN = Copy(SOURCE.functions[0], ((4, b"        assert y == 3"),))
PLAIN = Copy(SOURCE.functions[0])
FILE, PLACES = with_copies(SOURCE, [PLAIN, TWIN], "t")


def ran(log: str, parser: str, junit: str = "") -> SuiteRun:
    run = TestRun(ExecStatus(ExecState.EXITED, 1), log.encode(), junit.encode() or None)
    return SuiteRun(run, None, bool(junit), parser_of(tiny_instance(log_parser=parser)))


def test_copies_stand_behind_their_test_with_names_of_their_own() -> None:
    """`test_x__t1` is the twin; the test itself keeps its lines."""
    assert FILE.startswith(TEXT.encode())
    place = PLACES[TWIN]
    assert place.name == "test_x__t1"
    lines = FILE.split(b"\n")[place.first - 1 : place.last]
    assert lines == [b"    def test_x__t1(self):", b"        y = 1", b"        assert y == 3"]


def test_python_tracebacks_of_django_and_sympy_are_read() -> None:
    place = PLACES[TWIN]
    log = (
        f"test_x__t1 (a.tests.test_b.T) ... FAIL\n\nFAIL: test_x__t1 (a.tests.test_b.T)\n------\n"
        f'Traceback (most recent call last):\n  File "/testbed/a/tests/test_b.py", line {place.last}, '
        "in test_x__t1\n    assert y == 3\nAssertionError\n\nRan 1 test in 0.0s\n"
    )

    shown = behaviours(ran(log, "parse_log_django"), list(PLACES.values()))

    assert shown[place].failures == {("AssertionError", 2)}
    assert shown[place].statuses == {TestStatus.FAILED}
    assert shown[PLACES[PLAIN]] == NOT_RUN


def test_junit_files_of_pytest_are_read() -> None:
    place = PLACES[TWIN]
    junit = (
        '<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite><testcase classname="a.T" '
        f'name="{place.name}"><failure message="pkg.errors.Bad: no">File "/testbed/a/tests/test_b.py", '
        f"line {place.first + 1}, in x</failure></testcase></testsuite></testsuites>"
    )
    log = f"FAILED a/tests/test_b.py::T::{place.name} - pkg.errors.Bad: no\n"

    shown = behaviours(ran(log, "pytest", junit), list(PLACES.values()))

    assert shown[place].failures == {("Bad", 1)}
