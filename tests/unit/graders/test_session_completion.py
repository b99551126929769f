"""A cut log is never a success: checks of the runner's summary, its counts and its exit code."""

import pytest

from perdure.graders.reports.session_completion import find_truncation

SYMPY = b"""\
sympy/sets/tests/test_a.py[2]
test_a ok
test_b ok                                                       [OK]
sympy/sets/tests/test_c.py[1]
test_canary F                                                 [FAIL]
________________ sympy/sets/tests/test_c.py:test_canary ________________
AssertionError
=========== tests finished: 2 passed, 1 failed, in 0.01 seconds ===========
DO *NOT* COMMIT!
"""
DJANGO = b"""\
test_a (app.tests.Case) ... ok
test_canary (app.test_canary.Test) ... FAIL

======================================================================
FAIL: test_canary (app.test_canary.Test)
----------------------------------------------------------------------
Ran 3 tests in 0.001s

FAILED (failures=1)
Destroying test database for alias 'default'...
"""


TESTS = ("test_a", "test_b")


@pytest.mark.parametrize(("parser", "log"), [("parse_log_sympy", SYMPY), ("django", DJANGO)])
def test_a_session_that_ended_by_itself_is_believed(parser: str, log: bytes) -> None:
    """A summary with a failure and with as many tests as must have run is trusted."""
    wrapped = log.replace(b"1 failed, in", b"1 failed,\nin")

    assert find_truncation(parser, log, 1, TESTS) == ""
    assert find_truncation(parser, wrapped, 1, TESTS) == ""


@pytest.mark.parametrize(
    ("parser", "log", "words"),
    [
        ("sympy", SYMPY[: SYMPY.index(b"____")], "ends before"),
        ("sympy", SYMPY[: SYMPY.index(b"DO *")], "ends before"),
        ("sympy", SYMPY.replace(b"1 failed", b"1 skipped"), "no failure"),
        ("sympy", SYMPY.replace(b"2 passed", b"1 passed"), "2 tests instead of 3"),
        ("django", DJANGO[: DJANGO.index(b"Ran 3")], "ends before"),
        ("django", DJANGO.replace(b"FAILED (failures=1)", b"OK"), "ends before"),
        ("django", DJANGO.replace(b"Ran 3", b"Ran 2"), "2 tests instead of 3"),
        ("sympy", SYMPY.replace(b"c.py:test_canary", b"a.py:test_b") + b"test_b ok\n", "both"),
        ("django", DJANGO.replace(b"FAIL: test_canary (", b"FAIL: test_b\n("), "both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cut_log_is_not(parser: str, log: bytes, words: str) -> None:
    """The reason names the part of the summary that is missing or wrong."""
    assert words in find_truncation(parser, log, 1, TESTS)


@pytest.mark.parametrize("code", [0, 2, 94, 137, None])
def test_only_a_runner_that_failed_a_test_ends_with_1(code: int | None) -> None:
    """The canary fails, so another exit code means that the runner did not end by itself."""
    assert "exit code" in find_truncation("pytest", b"", code, TESTS)
