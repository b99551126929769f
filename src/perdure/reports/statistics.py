"""The statistics of a report. numpy is imported where it is used."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from perdure.errors import MissingDependency
from perdure.installation import command_for_extra

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 20210707
"""Fixed, so that the same run gives the same report."""
CHUNK = 4_000_000
"""Numbers of one block of resamples: bounds the memory."""


class Interval(NamedTuple):
    """A mean over instances with its confidence interval; `instances`: how many there are."""

    mean: float
    low: float
    high: float
    instances: int


def pass_at_k(samples: int, resolved: int, k: int) -> float:
    """The unbiased estimate of pass@k: the chance that one of k samples, drawn without replacement,
    is resolved. Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.

    Example:
        pass_at_k(samples=4, resolved=2, k=2) -> 0.8333
    """
    return 1.0 - math.comb(samples - resolved, k) / math.comb(samples, k)


def pass_curve(tries: Mapping[str, Sequence[bool]]) -> dict[int, Interval]:
    """pass@k for every k, over the instances with at least k graded samples.

    `tries`: instance -> whether each graded sample is resolved.
    """
    most = max(map(len, tries.values()), default=0)
    curve = {}
    for k in range(1, most + 1):
        chances = [pass_at_k(len(one), sum(one), k) for one in tries.values() if len(one) >= k]
        curve[k] = interval(chances)
    return curve


def interval(values: Sequence[float]) -> Interval:
    """The mean and its percentile interval by bootstrap: instances are drawn with replacement.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    Raises: MissingDependency without numpy.
    """
    count = len(values)
    if not count:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    if count == 1 or min(values) == max(values):
        return Interval(mean, mean, mean, count)
    low, high = _quantiles(values)
    return Interval(mean, low, high, count)


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    try:
        import numpy as np
    except ModuleNotFoundError as error:
        raise MissingDependency(f"numpy is missing: {command_for_extra('report')}") from error
    drawn = np.random.default_rng(SEED)
    data = np.asarray(values, dtype=np.float64)
    rows = max(1, CHUNK // len(values))
    means = np.concatenate(
        [
            data[drawn.integers(0, len(data), size=(min(rows, RESAMPLES - at), len(data)))].mean(1)
            for at in range(0, RESAMPLES, rows)
        ]
    )
    tail = (1 - CONFIDENCE) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p of as uneven a split if either side were as likely; ties do not count.

    With one sample an instance, this is McNemar's exact test. Source: McNemar 1947, Psychometrika 12.
    """
    count = wins + losses
    if not count:
        return 1.0
    tail = sum(math.comb(count, one) for one in range(min(wins, losses) + 1))
    return min(1.0, tail / (1 << (count - 1)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order, the nearest rank; nan without any."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
