"""The statistics of a report."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
INTERVAL_METHOD = "Clopper and Pearson over instances, as clusters by Korn and Graubard 1998"
"""With one sample per instance, it is Clopper and Pearson's exact interval."""


class Interval(NamedTuple):
    """A mean over instances, its confidence interval, and the number of instances."""

    mean: float
    low: float
    high: float
    instances: int


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)
BISECTIONS, TERMS, EXACT = 60, 500, 1e-12
"""Limits of numerical precision: bisection steps, terms of the series, and its tolerance."""


def pass_at_k(samples: int, resolved: int, k: int) -> float:
    """The unbiased estimate of pass@k: the probability that at least one of k samples, drawn
    without replacement, is resolved. Source: Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", eq. 1.

    Example:
        pass_at_k(samples=4, resolved=2, k=2) -> 0.8333
    """
    return 1.0 - math.comb(samples - resolved, k) / math.comb(samples, k)


def pass_curve(tries: Mapping[str, Sequence[bool]]) -> dict[int, Interval]:
    """pass@k for each k, over the instances with at least k graded samples.

    `tries`: instance -> whether each graded sample is resolved.
    """
    most = max(map(len, tries.values()), default=0)
    curve = {}
    for k in range(1, most + 1):
        chances = [pass_at_k(len(one), sum(one), k) for one in tries.values() if len(one) >= k]
        tries_of_k = sum(len(one) // k for one in tries.values())
        curve[k] = share_interval(chances, tries_of_k)
    return curve


def share_interval(values: Sequence[float], tries: int) -> Interval:
    """The mean of `values`, one share per instance, and its interval, which is valid for few
    instances too.

    Samples of one instance are correlated, so `tries` samples carry less information than `tries`
    independent ones. The variance between instances gives the effective number of samples, with a
    correction for few instances: at most `tries`, and at least one per instance. The interval is
    Clopper and Pearson's exact one for that number. Source: Korn and Graubard 1998, Survey
    Methodology 24. Instances as clusters: Miller 2024, arXiv:2411.00640. A normal approximation
    covers too little below a few hundred instances: Bowyer et al. 2025, arXiv:2503.01747.
    """
    count = len(values)
    if not count:
        return NO_INTERVAL
    mean = math.fsum(values) / count
    number = float(count)
    if count > 1:
        spread = math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count
        alike = mean * (1 - mean) / spread if spread else float(tries)
        correction = (_student(tries - 1) / _student(count - 1)) ** 2 if tries > count else 1.0
        number = max(float(count), min(alike * correction, float(tries)))
        if mean in (0.0, 1.0):  # the sample shows no variance between instances
            number = float(count)
    hits, tail = mean * number, (1 - CONFIDENCE) / 2
    low = _beta_quantile(hits, number - hits + 1, tail) if hits > 0 else 0.0
    high = _beta_quantile(hits + 1, number - hits, 1 - tail) if hits < number else 1.0
    return Interval(mean, low, high, count)


def difference_interval(values: Sequence[float]) -> Interval:
    """The mean of paired differences, each from -1 to 1, and its interval.

    Two pairs are added (half a win, half a loss and a tie), so that the interval is never empty.
    Source: Agresti and Min 2005, Statistics in Medicine 24, with Student's quantile.
    """
    count = len(values)
    if not count:
        return NO_INTERVAL
    mean = math.fsum(values) / count
    number = count + 2
    middle = math.fsum(values) / number
    squares = math.fsum(value * value for value in values) + 1
    half = _student(number - 1) * math.sqrt((squares / number - middle**2) / number)
    return Interval(
        mean, max(-1.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)), count
    )


def _student(freedom: int) -> float:
    """The two-sided quantile of Student's distribution at `CONFIDENCE`."""
    share = _beta_quantile(freedom / 2, 0.5, 1 - CONFIDENCE)
    return math.sqrt(freedom * (1 - share) / share)


def _beta_quantile(a: float, b: float, share: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_share(a, b, middle) < share else (low, middle)
    return (low + high) / 2


def _beta_share(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction. Source: Press et al.
    2007, "Numerical Recipes", section 6.4."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta_share(b, a, 1.0 - x)
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1.0 / (1.0 + step * d)
            c = 1.0 + step / c
            fraction *= c * d
        if abs(c * d - 1.0) < EXACT:
            break
    return front * fraction


def sign_test(wins: int, losses: int) -> float:
    """The two-sided p of an exact sign test: the probability of a split at least this uneven if
    wins and losses were equally likely. Ties do not count. With one sample per instance, it is
    McNemar's exact test. Source: McNemar 1947, Psychometrika 12.
    """
    count = wins + losses
    if not count:
        return 1.0
    tail = sum(math.comb(count, one) for one in range(min(wins, losses) + 1))
    return min(1.0, tail / (1 << (count - 1)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of values in ascending order; nan without values."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
