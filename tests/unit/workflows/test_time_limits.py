"""Temporal's limit for one try leaves a stage enough time for all its parts."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.graders.base import Graded
from perdure.graders.diff import diff_capture as diff
from perdure.graders.twins import paired_runs
from perdure.rollouts import capture_stage
from perdure.rollouts.sandbox import pristine_control
from perdure.types import Instance, Outcome, RolloutRequest
from tests.unit.graders.twins.test_twin_verdict import INSTANCE, ORIGINALS, ended, honest
from workflows import activity_options

REQUEST = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")
TESTS_S = 7200.0


async def test_a_capture_that_is_refused_as_late_as_possible_has_its_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part takes as long as its own limit allows."""
    spent: list[float] = []

    async def take(*_: Any) -> diff._Taken:
        spent.append(diff._LIMIT_S)
        return diff._Taken(problem="ended by time")

    async def works(_: object) -> bool:
        spent.append(pristine_control.CONTROL_S)
        return True

    monkeypatch.setattr(diff, "_take", take)
    monkeypatch.setattr(capture_stage, "sandboxes_work", works)
    job: Any = SimpleNamespace(
        agent_sandbox=SimpleNamespace(admission=SimpleNamespace(metered=False)),
        services=SimpleNamespace(settings=SimpleNamespace(diff_max_bytes=10)),
    )
    captured = await capture_stage._captured(job, cast(Any, None), diff.BASE_GIT)
    limit = activity_options.capture(REQUEST, None, 0.0)["start_to_close_timeout"]

    assert captured.refused == "ended by time"
    assert sum(spent) < limit.total_seconds()


@pytest.mark.parametrize("pairs", [0, 1, 2])
async def test_a_grading_has_the_time_of_all_its_runs(pairs: int) -> None:
    """They follow each other, as on a metered account. In the last pair, only the official run can be
    parsed, and each other run also costs a control."""
    numbers = itertools.count(1)
    spent: list[float] = []

    async def once(instance: Instance) -> Graded:
        number = next(numbers)
        is_official = pairs == 1 and instance.grading.test_patch == ORIGINALS
        if is_official or number <= 3 * (pairs - 1):
            spent.append(TESTS_S)
            return Graded(honest(instance.grading.test_patch), b"")
        spent.extend([TESTS_S, TESTS_S])
        return Graded(ended(Outcome.UNPARSABLE), b"")

    await paired_runs.verified(INSTANCE, pairs, once, at_once=False)
    assert next(numbers) == 1 + max(1, 3 * pairs)
    request = REQUEST.model_copy(update={"twin_pairs": pairs})
    limit = activity_options.grade(request, TESTS_S)["start_to_close_timeout"]

    assert sum(spent) < limit.total_seconds()
