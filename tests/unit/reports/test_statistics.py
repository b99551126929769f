"""The statistics of a report, against values that are known or counted in full."""

import itertools
import math
import random

import pytest

from perdure.reports.statistics import interval, pass_at_k, pass_curve, sign_test


@pytest.mark.parametrize(("samples", "resolved"), [(4, 0), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_draws(samples: int, resolved: int) -> None:
    """The same as counting every way to draw k of the samples."""
    tries = [True] * resolved + [False] * (samples - resolved)
    for k in range(1, samples + 1):
        draws = list(itertools.combinations(tries, k))

        assert pass_at_k(samples, resolved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_an_instance_with_fewer_samples_is_left_out_of_larger_k() -> None:
    """pass@2 is over the instances that have two graded samples."""
    curve = pass_curve({"a": [True, False], "b": [False]})

    assert (curve[1].mean, curve[1].instances) == (0.25, 2)
    assert (curve[2].mean, curve[2].instances) == (1.0, 1)


def test_the_interval_is_that_of_the_binomial() -> None:
    """Of 400 instances, 100 resolved: within a point of the normal approximation, 0.25 ± 0.0424."""
    found = interval([1.0] * 100 + [0.0] * 300)

    assert (found.mean, found.instances) == (0.25, 400)
    assert found.low == pytest.approx(0.2076, abs=0.01)
    assert found.high == pytest.approx(0.2924, abs=0.01)


def test_the_interval_covers_the_truth() -> None:
    """Of 200 drawn samples, 95 % intervals miss the mean in some but not in many."""
    drawn = random.Random(7)
    found = [interval([float(drawn.random() < 0.4) for _ in range(60)]) for _ in range(200)]

    missed = sum(not one.low <= 0.4 <= one.high for one in found)
    assert 2 <= missed <= 24


def test_the_same_values_give_the_same_interval() -> None:
    """A report is the same each time it is made."""
    assert interval([0.0, 0.5, 1.0]) == interval([0.0, 0.5, 1.0])


def test_nothing_has_no_interval() -> None:
    """No instance is not 0."""
    assert math.isnan(interval([]).mean)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 0.03125), (9, 1, 0.021484375), (1, 9, 0.021484375)],
)
def test_the_paired_test_is_exact(wins: int, losses: int, p: float) -> None:
    """Two-sided binomial tails: 2 * 2^-6 for six of six, 22 / 1024 for nine of ten."""
    assert sign_test(wins, losses) == p
