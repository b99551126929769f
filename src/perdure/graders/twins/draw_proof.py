"""Calibration: proves the draws that gradings will use, with twins in place of their tests."""

import asyncio
import random
from collections.abc import Sequence
from itertools import compress

from perdure.graders import verdict_rules
from perdure.graders.protocols.test_lists import SuiteRun, reading_of
from perdure.graders.twins.calibration_runs import Bench
from perdure.graders.twins.patch_lines import with_twins
from perdure.types import Grading, Instance, TestStatus, Twin, TwinDraw

FAILING = frozenset((TestStatus.FAILED, TestStatus.ERROR))
PLACES = ((0,), (1,), (0, 1))
"""Which of the two runs with twins have the twin of a test. Counting the run of originals, two of
the three runs then have the same text of that test."""
DIVISIONS = 3
"""Ways to divide twins between two runs that calibration tries before it puts all into one run."""


async def proven_draws(
    bench: Bench, plain: Instance, pools: list[list[Twin]], wanted: int
) -> list[TwinDraw]:
    """About `wanted` draws. All have twins of the same functions, of as many functions as possible.

    Draws are made in threes. The three draws show the same pattern of equal texts between runs, but
    in each draw the run of originals has another place in the pattern. So code that compares all
    runs and knows all divisions must still guess one of three, unless calibration cannot prove some
    draws.
    """
    count = min(wanted, max(map(len, pools), default=0))
    count += -count % len(PLACES)
    divisions = [[random.randrange(len(PLACES)) for _ in pools] for _ in range(DIVISIONS)]
    proven: list[TwinDraw] = []
    for number in range(count):
        together = [pool[number % len(pool)] for pool in pools]
        turned = [[(place + number) % len(PLACES) for place in one] for one in divisions]
        draw = await _proven_draw(bench, plain, together, turned, str(number + 1))
        if draw is not None:
            proven.append(draw)
    most = max((_functions(draw) for draw in proven), key=len, default=frozenset())
    return [draw for draw in proven if _functions(draw) == most]


def _functions(draw: TwinDraw) -> frozenset[tuple[str, ...]]:
    return frozenset(twin.tests for run in draw.runs for twin in run)


async def _proven_draw(
    bench: Bench,
    plain: Instance,
    together: list[Twin],
    divisions: Sequence[Sequence[int]],
    number: str,
) -> TwinDraw | None:
    """The first division of these twins into runs that is proven under gold: in each run, the twins
    fail and all other tests pass. Twins that pass under the base are left out."""
    base = await statuses_with(bench, plain, b"", together, f"proof-base-{number}")
    left = [not _any(twin, base, verdict_rules.F2P_PASSES) for twin in together]
    twins = list(compress(together, left))
    divided_in = [divided(twins, list(compress(one, left))) for one in divisions]
    for division, runs in enumerate([*divided_in, (tuple(twins),)] if twins else []):
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


def divided(
    twins: Sequence[Twin], places: Sequence[int]
) -> tuple[tuple[Twin, ...], tuple[Twin, ...]]:
    """Divide the twins between two runs. `places`: the index into PLACES for each twin. Code under
    test that sees only one run must judge each test by itself."""
    placed = [(twin, PLACES[place]) for twin, place in zip(twins, places, strict=True)]
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
