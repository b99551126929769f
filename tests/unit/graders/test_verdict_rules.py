"""Logs and junit files give statuses; statuses give an outcome and rewards."""

import shlex

import pytest

from perdure.errors import InstanceError
from perdure.graders.forged_results import instrument_command
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.graders.reports.junit_statuses import UnusableJunit, parse_junit
from perdure.graders.verdict_rules import score, status_of
from perdure.testing.grader_contract import tiny_instance
from perdure.types import Grading, Outcome, TestStatus

PASSED, FAILED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR
SKIPPED, XFAIL, MISSING = TestStatus.SKIPPED, TestStatus.XFAIL, TestStatus.MISSING

JUNIT = b"""<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.a.Case" name="test_one[x]" />
<testcase classname="tests.a" name="test_two"><failure message="no">x</failure></testcase>
<testcase classname="tests.a" name="test_three"><skipped type="pytest.skip" /></testcase>
<testcase classname="tests.a" name="test_four"><skipped type="pytest.xfail" /></testcase>
<testcase classname="tests.a" name="test_five" /><testcase classname="tests.a" name="test_five"><error/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("test", "status"),
    [
        ("tests/a.py::Case::test_one[x]", PASSED),
        ("pkg/tests/a.py::Case::test_one[x]", PASSED),
        ("tests/a.py::test_two", FAILED),
        ("tests/a.py::test_three", SKIPPED),
        ("tests/a.py::test_four", XFAIL),
        ("tests/a.py::test_five", ERROR),
        ("tests/a.py::test_six", None),
        ("tests/b.py::test_two", None),
    ],
)
def test_finds_ids_in_junit(test: str, status: TestStatus | None) -> None:
    """junit finds an id of the log, even if rootdir and workdir differ."""
    assert parse_junit(JUNIT).get(test) is status


@pytest.mark.parametrize(
    "data",
    [b"", b"<testsuites/>", JUNIT[:-20], JUNIT.replace(b"<testsuites>", b"<!DOCTYPE x []><testsuites>")],
    ids=["empty", "headless", "cut", "dtd"],
)  # fmt: skip
def test_refuses_unusable_junit(data: bytes) -> None:
    """A junit file that is cut off, or not pytest's, confirms no test."""
    with pytest.raises(UnusableJunit):
        parse_junit(data)


@pytest.mark.parametrize(
    ("f2p", "p2p", "outcome"),
    [
        (PASSED, PASSED, Outcome.RESOLVED),
        (XFAIL, XFAIL, Outcome.RESOLVED),
        (PASSED, SKIPPED, Outcome.RESOLVED),
        (SKIPPED, PASSED, Outcome.UNRESOLVED),
        (FAILED, PASSED, Outcome.UNRESOLVED),
        (MISSING, PASSED, Outcome.UNRESOLVED),
        (PASSED, MISSING, Outcome.UNRESOLVED),
        (PASSED, ERROR, Outcome.UNRESOLVED),
    ],
)
def test_pass_rules_of_both_lists(f2p: TestStatus, p2p: TestStatus, outcome: Outcome) -> None:
    """F2P passes on PASSED or XFAIL, P2P also on SKIPPED; an absent test fails in both."""
    ran = {t: s for t, s in {"f": f2p, "p": p2p}.items() if s is not MISSING}

    assert score(ran, ["f"], ["p"]).outcome is outcome


def test_xfail_needs_a_test_that_speaks_of_it() -> None:
    """If the code under test made an F2P test xfail, it counts as skipped."""
    result = score({"f": XFAIL}, ["f"], [], may_xfail=False)

    assert (result.outcome, result.fail_to_pass) == (Outcome.UNRESOLVED, {"f": SKIPPED})


def test_fail_only_counts_explicit_failures() -> None:
    """Under `fail_only`, a test without a result is fine; a failed one is not."""
    assert score({}, ["f"], ["p"], eval_type="fail_only").outcome is Outcome.RESOLVED
    assert score({"p": FAILED}, ["f"], ["p"], eval_type="fail_only").outcome is Outcome.UNRESOLVED


def test_rewards_are_fractions() -> None:
    """Dense rewards count passed tests; an empty F2P gives 0, an empty P2P gives 1."""
    rewards = score({"f": PASSED, "p": PASSED}, ["f", "g"], ["p", "q"]).rewards
    empty = score({}, [], []).rewards

    assert (rewards.binary, rewards.f2p_fraction, rewards.p2p_fraction) == (0.0, 0.5, 0.5)
    assert rewards.partial == 0.5
    assert (empty.binary, empty.f2p_fraction, empty.p2p_fraction) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"t[a b]": PASSED, "t[a c]": PASSED}, PASSED),
        ({"t[a b]": PASSED, "t[a c]": FAILED}, MISSING),
        ({"t[b]": PASSED}, MISSING),
    ],
)
def test_truncated_ids_need_agreement(
    statuses: dict[str, TestStatus], expected: TestStatus
) -> None:
    """A published id that was cut at a space names all tests that start with it, if they agree."""
    assert status_of("t[a", statuses) is expected


@pytest.mark.parametrize(
    ("command", "folder", "named"),
    [
        ("pytest -rA tests/unit/test_a.py tests/test_b.py", "tests/unit", True),
        ("python -m pytest --durations 25 tests/test_a.py::test_x", "tests", True),
        ("pytest -p no:x -c conf/a.ini tests/", "tests", True),
        ("pytest -rA", "tests", False),
        ("source env && cd .\ntox -e py -- test_a.py", ".", True),
    ],
)
def test_canary_joins_the_hidden_tests(command: str, folder: str, named: bool) -> None:
    """The canary is in the folder of the command's first test, and is named only if other tests
    are."""
    guarded, canary = instrument_command(tiny_instance(test_cmd=command).grading, "/tmp/x")

    assert canary is not None
    assert canary.path.rpartition("/")[0] == folder.removeprefix(".")
    assert (canary.path in guarded.shell) == named
    assert guarded.shell.startswith(command)


def test_a_junit_path_with_a_space_is_one_argument() -> None:
    """The `local` provider's temporary folder is below the home, which may have any name."""
    guarded, _ = instrument_command(tiny_instance(test_cmd="pytest tests").grading, "/my home/x")

    assert f"--junitxml={guarded.junit_path}" in shlex.split(guarded.shell)


def test_canary_matches_a_keyword_expression() -> None:
    """If `-k` selects tests, it also selects the canary's name."""
    grading = tiny_instance(test_cmd="pytest -rA tests/a.py -k 'not slow and parser'").grading

    _, canary = instrument_command(grading, "/tmp/x")

    assert canary is not None
    assert "parser" in canary.name


@pytest.mark.parametrize(
    ("parser", "command", "argument"),
    [
        ("parse_log_sympy", "bin/test -C --verbose sympy/a/tests/test_b.py", "sympy/a/tests/test_"),
        ("parse_log_django", "./tests/runtests.py --verbosity 2 app.tests other", "other.test_"),
    ],
)
def test_canary_speaks_each_runners_language(parser: str, command: str, argument: str) -> None:
    """Runners without junit get the canary as a path or as a label."""
    grading = Grading(test_cmd=command, log_parser=parser)

    guarded, _ = instrument_command(grading, "/tmp/x")

    assert guarded.shell.startswith(f"{command} {argument}")
    assert guarded.junit_path == ""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("test_cmd", None, "lacks `test_cmd`"),
        ("test_cmd", "make test", "must end in a call of pytest"),
        ("fail_to_pass", (), "lacks `FAIL_TO_PASS`"),
        ("test_patch", b"nope", "`test_patch` is not a git diff"),
        ("log_parser", "x", r"unknown `log_parser`.*pytest, parse_log_ant"),
    ],
)
def test_defective_rows_are_refused_by_field(field: str, value: object, message: str) -> None:
    """validate names the missing or wrong field before any sandbox boots."""
    with pytest.raises(InstanceError, match=message):
        SwebenchGrader().validate(tiny_instance(**{field: value}))
