"""Runs the originals and the twins of a grading, each run in its own sandbox, until the verdict is
decided."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from perdure.graders.base import Graded
from perdure.graders.twins.twin_draw import Run, draw
from perdure.graders.twins.twin_support import why_no_canary, why_no_twins
from perdure.graders.twins.twin_verdict import Ran, combined, unverified
from perdure.types import Grade, Instance, Outcome

GradeOnce = Callable[[Instance], Awaitable[Graded]]
"""Grades the patch against an instance, in a fresh sandbox."""


class Verified(NamedTuple):
    """The grade of a patch, and its runs; the first is the run of originals that gave the official
    verdict."""

    grade: Grade
    runs: tuple[Graded, ...]


async def verified(
    instance: Instance,
    pairs: int,
    grade_once: GradeOnce,
    *,
    at_once: bool = True,
    without: Mapping[str, str] = MappingProxyType({}),
) -> Verified:
    """Grade in one run if the instance has no twins or `pairs` is 0. Otherwise grade in the runs of
    each pair, one pair after the other, until a pair does not confirm the verdict.

    Pairs do not overlap, so code under test in one learns nothing from another.
    `at_once`: start all runs of a pair together, so that their order tells nothing either.
    `without`: FAIL_TO_PASS test -> why calibration found no twin for it.
    Raises: InstanceError if twins do not fit the test patch; any error of `grade_once`.
    """
    if not (pairs and instance.grading.twin_draws):
        graded = await grade_once(instance)
        reason = _why_none(instance, without) if pairs else "twin_pairs is 0"
        return Verified(unverified(graded.grade, reason), (graded,))
    done: list[tuple[Run, Graded]] = []
    for number in range(pairs):
        drawn = draw(instance)
        done += await _graded(drawn, grade_once, len(drawn) if at_once else 1, whole=number > 0)
        grade = combined(instance, [Ran(run, graded.grade) for run, graded in done])
        if grade.outcome is not Outcome.RESOLVED:
            break
    return Verified(grade, tuple(graded for _, graded in done))


async def _graded(
    drawn: Sequence[Run], grade_once: GradeOnce, most: int, *, whole: bool
) -> list[tuple[Run, Graded]]:
    """Grade at most `most` runs at a time, in the order of `drawn`. The run of originals is first
    in the result. If it does not resolve the row, the other runs are cancelled, unless `whole` is
    set."""
    free = asyncio.Semaphore(most)

    async def graded(run: Run) -> Graded:
        async with free:
            return await grade_once(run.instance)

    tasks = [(run, asyncio.create_task(graded(run))) for run in drawn]
    tasks.sort(key=lambda entry: bool(entry[0].twins))
    try:
        run, official = tasks[0]
        if not whole and (await official).grade.outcome is not Outcome.RESOLVED:
            return [(run, official.result())]
        done = await asyncio.gather(*(task for _, task in tasks))
        return list(zip([run for run, _ in tasks], done, strict=True))
    finally:
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)


def _why_none(instance: Instance, found: Mapping[str, str]) -> str:
    why = why_no_twins(instance.grading)
    if why is None:
        why = "no test has a twin: calibrate the instance"
        why = next((f"no twin of {test}: {reason}" for test, reason in found.items()), why)
    without = why_no_canary(instance.grading)
    return f"{why}; no canary test either: {without}" if without else why
