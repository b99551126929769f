"""Judges that see the text of one run, and how often they win."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy

from benchmarks.judge.text_features import Vector, features
from benchmarks.judge.twin_pools import Shown, TwinCase
from perdure.graders.twins.plausibility_judge import MARGIN, advantage

Judge = Callable[[Shown], bool]
"""Whether it takes the text for an original."""


@cache
def by_rules(shown: Shown) -> bool:
    """Calibration's own judge: no neighbor of the same form is more plausible."""
    same = [one for one in shown.neighbors if not one.changes_form]
    return all(advantage(shown.source, one) >= -MARGIN for one in same)


def wins(judge: Judge, case: TwinCase) -> bool:
    """It must recognize the text of both runs. A coin does so in 1 of 4 cases."""
    return judge(case.original) and not judge(case.twin)


@dataclass(frozen=True)
class LearnedJudge:
    """A logistic regression over `features`."""

    mean: Vector
    scale: Vector
    weights: Vector

    @classmethod
    def trained(cls, cases: Sequence[TwinCase], ridge: float = 100.0) -> "LearnedJudge":
        """By Newton's method. Each case gives one original and one twin."""
        seen = numpy.array([features(s) for one in cases for s in (one.original, one.twin)])
        target = numpy.tile([1.0, 0.0], len(cases))
        mean, scale = seen.mean(0), seen.std(0) + 1e-9
        inputs = numpy.column_stack([(seen - mean) / scale, numpy.ones(len(seen))])
        weights = numpy.zeros(inputs.shape[1])
        for _ in range(12):
            said = 1 / (1 + numpy.exp(-numpy.clip(inputs @ weights, -30, 30)))
            slope = inputs.T @ (target - said) - ridge * weights
            curve = (inputs.T * (said * (1 - said))) @ inputs + ridge * numpy.eye(len(weights))
            weights += numpy.linalg.solve(curve, slope)
        return cls(mean, scale, weights)

    def __call__(self, shown: Shown) -> bool:
        scaled = (features(shown) - self.mean) / self.scale
        return bool(scaled @ self.weights[:-1] + self.weights[-1] > 0)


def out_of_sample(cases: Sequence[TwinCase]) -> dict[str, LearnedJudge]:
    """Row -> a judge that has learned from rows of other packages only."""
    return {
        one.row: LearnedJudge.trained([other for other in cases if other.package != one.package])
        for one in {case.row: case for case in cases}.values()
    }


def win_rate(won: Iterable[bool]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval by bootstrap over the twins."""
    values = numpy.array(list(won), float)
    draws = numpy.random.default_rng(0).choice(values, (1000, len(values))).mean(1)
    low, high = numpy.quantile(draws, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)
