"""A grade without twins is unverified, and says why."""

import pytest

from perdure.graders.base import Graded
from perdure.graders.twins.paired_runs import verified
from perdure.testing.grader_contract import diff_of, tiny_instance
from perdure.types import Grade, Grading, Instance, Outcome, Rewards

RESOLVED = Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0))
PYTHON = diff_of({"tests/test_a.py": "def test_a():\n    assert True\n"})
GO = diff_of({"a_test.go": "package a\n"})
RUBY = diff_of({"a_test.rb": "require 'a'\n"})


async def resolved(_: Instance) -> Graded:
    return Graded(RESOLVED, b"")


@pytest.mark.parametrize(
    ("grading", "why"),
    [
        (
            Grading(protocol="eval_cmd"),
            "no test patch; no canary test either: its command gives one exit code",
        ),
        (
            Grading(protocol="reward_file"),
            "a number, not a status per test; no canary test either",
        ),
        (
            Grading(protocol="multi_swe", test_patch=RUBY),
            "not in Python, JavaScript, TypeScript, Go, Rust, Java or C; no canary test either",
        ),
        (
            Grading(protocol="multi_swe", test_patch=PYTHON),
            "no test has a twin: calibrate the instance; no canary test either",
        ),
        (
            Grading(protocol="swepro"),
            "no test patch; no canary test either: its script decides what runs",
        ),
        (
            Grading(test_cmd="go test", log_parser="parse_log_gotest", test_patch=GO),
            "calibrate the instance; no canary test either: calibration has proven none",
        ),
        (Grading(protocol="status_map"), "whole files instead of a test patch"),
    ],
)
async def test_a_format_that_can_prove_no_run_is_unverified(grading: Grading, why: str) -> None:
    """A resolved grade of such a format keeps its reward and names what is missing."""
    row = tiny_instance().model_copy(update={"grading": grading})
    grade = (await verified(row, 1, resolved)).grade

    assert (grade.outcome, grade.reward) == (Outcome.RESOLVED, 1.0)
    assert grade.verification is not None
    assert grade.verification.state == "unverified"
    assert why in grade.verification.reason


async def test_a_calibrated_row_says_why_no_test_has_a_twin() -> None:
    """The reason is that of calibration, not advice to calibrate the row."""
    why = {"t.py::test_a": "no rule can change its expectation"}
    grade = (await verified(tiny_instance(), 1, resolved, without=why)).grade

    assert grade.verification is not None
    assert grade.verification.reason == (
        "no twin of t.py::test_a: no rule can change its expectation"
    )
