"""Temporal's limit for one try leaves a stage enough time for all its parts."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.graders.base import Graded
from perdure.graders.diff import diff_capture as diff
from perdure.graders.twins import paired_runs
from perdure.graders.twins.twin_draw import Run
from perdure.rollouts import capture_stage
from perdure.rollouts.sandbox import pristine_control
from perdure.types import Instance, Outcome, RolloutRequest
from tests.unit.graders.twins.test_twin_draw import ADD, NEGATIVE
from tests.unit.graders.twins.test_twin_verdict import INSTANCE, P, ended, grade
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
    limit = activity_options.capture(REQUEST, None)["start_to_close_timeout"]

    assert captured.refused == "ended by time"
    assert sum(spent) < limit.total_seconds()


@pytest.mark.parametrize("pairs", [0, 1, 2])
async def test_a_grading_has_the_time_of_all_its_runs(
    monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    """They follow each other, as on a metered account. No run with twins can be parsed, and each
    such run also costs a control."""
    pair = Run(INSTANCE, (ADD,)), Run(INSTANCE, (NEGATIVE,))
    drawn = [Run(INSTANCE), *pair * pairs] if pairs else []
    monkeypatch.setattr(paired_runs, "draw", lambda *_: drawn)
    done = itertools.count(1)
    spent: list[float] = []

    async def once(_: Instance) -> Graded:
        is_read = next(done) == 1 and pairs > 0
        spent.extend([TESTS_S] if is_read else [TESTS_S, TESTS_S])
        return Graded(grade(P, P) if is_read else ended(Outcome.UNPARSABLE), b"")

    await paired_runs.verified(INSTANCE, pairs, once, at_once=False)
    request = REQUEST.model_copy(update={"twin_pairs": pairs})
    limit = activity_options.grade(request, TESTS_S)["start_to_close_timeout"]

    assert sum(spent) < limit.total_seconds()
