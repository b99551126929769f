"""A scripted engine whose calls take scripted, uneven times, and what its log says of the callers."""

import asyncio
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.call_log import EndpointCall
from benchmarks.model_endpoint import TimedEngine

SPREAD = 0.8
"""Standard deviation of the logarithm of a call's seconds: one call in a hundred takes 6 x the median."""
LONGEST = 8.0
"""No call takes longer than this multiple of the median."""


class PacedEngine(TimedEngine):
    """The n-th call takes the n-th time of `paces`, whoever makes it."""

    paces: Iterator[float]

    async def _take_time(self) -> None:
        await asyncio.sleep(next(self.paces))


def paces(median_s: float, seed: int) -> Iterator[float]:
    """Seconds a call, log-normal. Equal seeds give equal times."""
    chance = random.Random(seed)
    while True:
        yield median_s * min(chance.lognormvariate(0.0, SPREAD), LONGEST)


@dataclass(frozen=True)
class EngineTimes:
    """`between_p50_s`, `between_p95_s`: seconds from a call's answer to the next call of its session.
    `idle`: share of the time from the first call to the last answer without any call. `busy_slots`: mean
    number of calls that ran at once."""

    between_p50_s: float
    between_p95_s: float
    idle: float
    busy_slots: float
    seconds: float


def times(calls: Sequence[EndpointCall]) -> EngineTimes:
    ordered = sorted(calls, key=lambda call: call.began)
    sessions: dict[str, list[EndpointCall]] = {}
    for call in ordered:
        sessions.setdefault(call.session, []).append(call)
    gaps = [
        later.began - earlier.ended
        for made in sessions.values()
        for earlier, later in itertools.pairwise(made)
    ]
    seconds = max(call.ended for call in ordered) - ordered[0].began
    idle, covered = 0.0, ordered[0].began
    for call in ordered:
        idle += max(0.0, call.began - covered)
        covered = max(covered, call.ended)
    busy = sum(call.ended - call.began for call in ordered)
    return EngineTimes(
        between_p50_s=statistics.median(gaps),
        between_p95_s=statistics.quantiles(gaps, n=20)[-1],
        idle=idle / seconds,
        busy_slots=busy / seconds,
        seconds=seconds,
    )
