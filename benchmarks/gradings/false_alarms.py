"""Grades correct fixes of made rows with each draw of twins. A false alarm is a correct fix that a
twin, the canary or another guard rejects.

A fix is correct if the row's own tests resolve it; a fix that they refuse is named, and counts as
`refused by a test`.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.gradings.grading_process import TIMEOUT_S, Grading
from benchmarks.gradings.made_fixes import Fix, base, fixed_modules, fixes, rows
from perdure.graders.base import Graded
from perdure.graders.gold_and_base_check import calibrate
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.graders.twins.paired_runs import verified
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import make_repository
from perdure.types import Grade, Instance, Outcome, TwinDraw, distinct_twins

RIGHT, REFUSED = "right", "refused by a test"
TWINS_PER_TEST = 5
"""Twins of each test, as calibration chooses by default."""


@dataclass
class RowResult:
    """The gradings of a row's fixes."""

    row: str
    contexts: int
    """Test functions of FAIL_TO_PASS."""
    with_twins: int
    """Those that have a twin."""
    twins: int
    draws: int
    variants: tuple[str, ...]
    """Other correct fixes under which the twins also failed."""
    counts: Counter[str] = field(default_factory=Counter)
    """Gradings by `kind_of`."""
    harmed: dict[str, list[str]] = field(default_factory=dict)
    """Fix -> kind and reason of each of its gradings that is not right."""
    seconds: float = 0.0

    def add(self, fix: Fix, grade: Grade) -> None:
        kind = kind_of(grade)
        self.counts[kind] += 1
        if kind != RIGHT:
            told = f"{kind}: {grade.reason}"
            self.harmed.setdefault(fix.name, []).append(told)
            print(f"{self.row}: {fix.name}: {told}", flush=True)


def kind_of(grade: Grade) -> str:
    """`right`, `refused by a test` if the row's own tests fail, or what harmed a correct fix."""
    if grade.outcome is Outcome.RESOLVED:
        return RIGHT
    if grade.official is Outcome.UNRESOLVED:
        return REFUSED
    if grade.official is not Outcome.RESOLVED:
        return f"{grade.official} in the run of originals"
    if grade.outcome is Outcome.TAMPERED:
        return "a twin passed"
    return f"{grade.outcome} in a run with twins"


async def measure(most_draws: int, folder: Path) -> list[RowResult]:
    """`most_draws`: how many draws of a row's twins each fix is graded with."""
    provider = BubblewrapProvider(Settings(home=folder / "home"))
    known = list(fixes())
    results = []
    for row in rows():
        result = await row_result(provider, row, known, most_draws, folder / row.instance_id)
        print(f"{row.instance_id}: {dict(result.counts)}, {result.seconds:.0f} s", flush=True)
        results.append(result)
    return results


async def row_result(
    provider: BubblewrapProvider, row: Instance, known: Sequence[Fix], most_draws: int, tree: Path
) -> RowResult:
    """Raises: InstanceError if calibration finds the row unfit."""
    started = time.monotonic()
    tree.mkdir(parents=True)
    make_repository(tree, base())
    grading = Grading(provider, tree, row)
    calibrated = await calibrate(
        row, grading.sandbox, runs=1, twins=TWINS_PER_TEST, timeout_s=TIMEOUT_S
    )
    proved = calibrated.instance.grading
    twins = distinct_twins(proved.twin_draws)
    result = RowResult(
        row.instance_id,
        contexts=len(_functions(proved.fail_to_pass)),
        with_twins=len(_functions([test for twin in twins for test in twin.tests])),
        twins=len(twins),
        draws=len(proved.twin_draws),
        variants=calibrated.report.variants,
    )
    single = [(draw,) for draw in proved.twin_draws[:most_draws]]
    drawn: list[tuple[TwinDraw, ...]] = [*single] or [()]
    slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def graded(fix: Fix, draws: tuple[TwinDraw, ...]) -> None:
        only = {"twin_draws": draws}
        one = calibrated.instance.model_copy(update={"grading": proved.model_copy(update=only)})
        async with slots:
            found = await verified(one, 1, partial(_grade_once, grading, fix.patch))
        result.add(fix, found.grade)

    await asyncio.gather(*(graded(fix, draws) for fix in known for draws in drawn))
    result.seconds = time.monotonic() - started
    return result


async def _grade_once(grading: Grading, patch: bytes, instance: Instance) -> Graded:
    async with await grading.sandbox("fixes") as sandbox:
        return await SwebenchGrader().grade(sandbox, instance, patch, timeout_s=TIMEOUT_S)


def _functions(tests: Sequence[str]) -> set[str]:
    return {test.split("[")[0] for test in tests}


def table(results: Sequence[RowResult]) -> str:
    lines = [
        "| row | contexts | with twins | twins | draws | gradings | right | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        cells = (one.row, one.contexts, one.with_twins, one.twins, one.draws)
        more = (one.counts.total(), one.counts[RIGHT], f"{one.seconds:.0f}")
        lines.append(f"| {' | '.join(map(str, (*cells, *more)))} |")
    counts = sum((one.counts for one in results), Counter[str]())
    alarms = counts.total() - counts[RIGHT] - counts[REFUSED]
    tried = len(fixed_modules())
    right = tried - len({fix for one in results for fix in one.harmed})
    contexts = sum(one.contexts for one in results)
    kinds = [f"- {kind}: {count}" for kind, count in counts.items() if kind != RIGHT]
    told = [
        f"fixes graded right: {right} of {tried}, in {contexts} contexts",
        f"gradings right: {counts[RIGHT]} of {counts.total()}; false alarms: {alarms}",
    ]
    return "\n".join([*lines, "", *told, *kinds])
