"""Calibration: proves the draws that gradings will use, with twins in place of their tests."""

import asyncio
import random
from collections.abc import Iterator, Sequence

from perdure.graders import verdict_rules
from perdure.graders.protocols.test_lists import SuiteRun, reading_of
from perdure.graders.twins.calibration_runs import Bench
from perdure.graders.twins.patch_lines import with_twins
from perdure.types import Grading, Instance, TestStatus, Twin, TwinDraw

FAILING = frozenset((TestStatus.FAILED, TestStatus.ERROR))


async def proven_draws(
    bench: Bench, plain: Instance, pools: list[list[Twin]], wanted: int
) -> list[TwinDraw]:
    """At most `wanted` draws that all have a twin of the same functions: of as many as possible."""
    proven: list[TwinDraw] = []
    for number in range(min(wanted, max(map(len, pools), default=0))):
        together = [pool[number % len(pool)] for pool in pools]
        draw = await _proven_draw(bench, plain, together, str(number + 1))
        if draw is not None:
            proven.append(draw)
    most = max((_functions(draw) for draw in proven), key=len, default=frozenset())
    return [draw for draw in proven if _functions(draw) == most]


def _functions(draw: TwinDraw) -> frozenset[tuple[str, ...]]:
    return frozenset(twin.tests for run in draw.runs for twin in run)


async def _proven_draw(
    bench: Bench, plain: Instance, together: list[Twin], number: str
) -> TwinDraw | None:
    """The first division of these twins into runs that is proven under gold: in each run, the twins
    fail and all other tests pass. Twins that the base passes, or that pass, are left out."""
    base = await statuses_with(bench, plain, b"", together, f"proof-base-{number}")
    together = [twin for twin in together if not _any(twin, base, verdict_rules.F2P_PASSES)]
    for division, runs in enumerate(_divisions(together)):
        found = await asyncio.gather(
            *(
                statuses_with(bench, plain, bench.gold, run, f"proof-{number}-{division}-{side}")
                for side, run in enumerate(runs)
            )
        )
        if all(
            is_proven(plain.grading, run, shown) for run, shown in zip(runs, found, strict=True)
        ):
            return TwinDraw(runs=runs)
    return None


DIVISIONS = 3
"""Random divisions between two runs that calibration tries, before all twins share one run."""
PLACES = ((0,), (1,), (0, 1))
"""The runs that a twin can be in."""


def _divisions(twins: Sequence[Twin]) -> Iterator[tuple[tuple[Twin, ...], ...]]:
    """Divisions between two runs, then all twins in one run.

    Each twin is in one run, in the other, or in both, with equal chances. With the run of originals,
    one text of each test is in two of three runs. Whichever run had the originals, the same texts
    were as likely, so code that compares the texts of all runs must still guess one of three. In
    one run, code must judge each test by itself.
    """
    for _ in range(DIVISIONS if twins else 0):
        yield divided(twins, [random.choice(PLACES) for _ in twins])
    if twins:
        yield (tuple(twins),)


def divided(
    twins: Sequence[Twin], places: Sequence[tuple[int, ...]]
) -> tuple[tuple[Twin, ...], tuple[Twin, ...]]:
    """The twins of two runs. `places`: the runs of each twin, 0 and 1."""
    placed = list(zip(twins, places, strict=True))
    first, second = (tuple(twin for twin, runs in placed if n in runs) for n in (0, 1))
    return first, second


async def statuses_with(
    bench: Bench, plain: Instance, patch: bytes, twins: Sequence[Twin], purpose: str
) -> dict[str, TestStatus]:
    tests = with_twins(plain.grading.test_patch, twins)
    grading = plain.grading.model_copy(update={"test_patch": tests})
    variant = plain.model_copy(update={"grading": grading})
    return await bench.read(parse_statuses, await bench.run(patch, purpose, instance=variant))


def is_proven(grading: Grading, twins: Sequence[Twin], shown: dict[str, TestStatus]) -> bool:
    having = {test for twin in twins for test in twin.tests}
    others = [t for t in (*grading.fail_to_pass, *grading.pass_to_pass) if t not in having]
    return all(_all(twin, shown, FAILING) for twin in twins) and all(
        verdict_rules.status_of(test, shown) in verdict_rules.P2P_PASSES for test in others
    )


def _all(twin: Twin, shown: dict[str, TestStatus], statuses: frozenset[TestStatus]) -> bool:
    return all(verdict_rules.status_of(test, shown) in statuses for test in twin.tests)


def _any(twin: Twin, shown: dict[str, TestStatus], statuses: frozenset[TestStatus]) -> bool:
    return any(verdict_rules.status_of(test, shown) in statuses for test in twin.tests)


def parse_statuses(suite: SuiteRun) -> dict[str, TestStatus]:
    """Call this through `read`."""
    return dict(reading_of(suite).statuses)
