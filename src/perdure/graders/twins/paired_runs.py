"""Runs the pairs of a grading, each run in its own sandbox, until the result is decided."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from perdure.graders.base import Graded
from perdure.graders.twins.twin_draw import draw
from perdure.graders.twins.twin_support import why_no_canary, why_no_twins
from perdure.graders.twins.twin_verdict import Ran, combined, is_decided, unverified
from perdure.types import Grade, Instance, Outcome

GradeOnce = Callable[[Instance], Awaitable[Graded]]
"""Grades the patch against an instance, in a fresh sandbox."""


class Verified(NamedTuple):
    """The grade of a patch, and its runs in order."""

    grade: Grade
    runs: tuple[Graded, ...]


async def verified(
    instance: Instance,
    pairs: int,
    grade_once: GradeOnce,
    *,
    without: Mapping[str, str] = MappingProxyType({}),
) -> Verified:
    """Grade in one run if the instance has no twins or `pairs` is 0, otherwise in up to two per
    pair.

    `without`: FAIL_TO_PASS test -> why calibration found no twin for it.
    Raises: InstanceError if twins do not fit the test patch; any error of `grade_once`.
    """
    drawn = draw(instance, pairs)
    if not drawn:
        graded = await grade_once(instance)
        reason = _why_none(instance, without) if pairs else "twin_pairs is 0"
        return Verified(unverified(graded.grade, reason), (graded,))
    done: list[Ran] = []
    runs: list[Graded] = []
    for number, run in enumerate(run for pair in drawn for run in pair):
        graded = await grade_once(run.instance)
        runs.append(graded)
        done.append(Ran(run, graded.grade))
        ends_pair = number % 2 == 1
        if (number == 0 and is_decided(done[0])) or (
            ends_pair and combined(instance, done).outcome is not Outcome.RESOLVED
        ):
            break
    return Verified(combined(instance, done), tuple(runs))


def _why_none(instance: Instance, found: Mapping[str, str]) -> str:
    why = why_no_twins(instance.grading)
    if why is None:
        why = "no test has a twin: calibrate the instance"
        why = next((f"no twin of {test}: {reason}" for test, reason in found.items()), why)
    without = why_no_canary(instance.grading)
    return f"{why}; no canary test either: {without}" if without else why
