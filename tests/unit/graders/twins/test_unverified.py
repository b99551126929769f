"""A grade without twins says so, and why."""

import pytest

from perdure.graders.base import Graded
from perdure.graders.twins.runs import verified
from perdure.testing.grader_contract import tiny_instance
from perdure.types import Grade, Grading, Instance, Outcome, Rewards

RESOLVED = Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0))


async def resolved(_: Instance) -> Graded:
    return Graded(RESOLVED, b"")


@pytest.mark.parametrize(
    ("protocol", "why"),
    [
        ("eval_cmd", "an exit code, and no status of a test; no canary test either"),
        ("reward_file", "a number, and no status of a test; no canary test either"),
        ("multi_swe", "not in Python; no canary test either"),
        ("swepro", "no test patch; no canary test either: its script decides what runs"),
        ("status_map", "no test patch says what they check"),
    ],
)
async def test_a_format_that_can_prove_no_run_is_unverified(protocol: str, why: str) -> None:
    """A resolved grade of it keeps its reward and names what it lacks."""
    row = tiny_instance().model_copy(update={"grading": Grading(protocol=protocol)})
    grade = (await verified(row, 1, resolved)).grade

    assert (grade.outcome, grade.reward) == (Outcome.RESOLVED, 1.0)
    assert grade.verification is not None
    assert grade.verification.state == "unverified"
    assert why in grade.verification.reason
