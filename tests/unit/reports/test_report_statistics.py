"""The statistics of a report, compared with known or fully counted values."""

import itertools
import math
import random

import pytest

from perdure.reports.report_statistics import (
    difference_interval,
    pass_at_k,
    pass_curve,
    share_interval,
    sign_test,
)


@pytest.mark.parametrize(("samples", "resolved"), [(4, 0), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_draws(samples: int, resolved: int) -> None:
    """It equals counting every way to draw k of the samples."""
    tries = [True] * resolved + [False] * (samples - resolved)
    for k in range(1, samples + 1):
        draws = list(itertools.combinations(tries, k))

        assert pass_at_k(samples, resolved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_an_instance_with_fewer_samples_is_left_out_of_larger_k() -> None:
    """pass@2 covers the instances with two graded samples."""
    curve = pass_curve({"a": [True, False], "b": [False]})

    assert (curve[1].mean, curve[1].instances) == (0.25, 2)
    assert (curve[2].mean, curve[2].instances) == (1.0, 1)


def test_the_interval_is_that_of_the_binomial() -> None:
    """For 100 resolved of 400 instances: Clopper and Pearson's 20.8 to 29.5 %."""
    found = share_interval([1.0] * 100 + [0.0] * 300, 400)

    assert (found.mean, found.instances) == (0.25, 400)
    assert found.low == pytest.approx(0.2083, abs=0.002)
    assert found.high == pytest.approx(0.2954, abs=0.002)


@pytest.mark.parametrize(
    ("values", "samples", "low", "high"),
    [
        ([0.0], 2, 0.0, 0.975),  # one instance says little
        ([1.0] * 3, 9, 0.2924, 1.0),  # as 3 of 3: the samples of an instance may all be alike
        ([0.75] * 4, 12, 0.2764, 0.9831),  # as 9 of 12, of which four groups prove less
        ([0.0, 1.0], 2, 0.0126, 0.9874),  # as 1 of 2
    ],
)
def test_few_instances_have_a_wide_interval(
    values: list[float], samples: int, low: float, high: float
) -> None:
    """One to five instances prove little, and equal shares are no certainty."""
    found = share_interval(values, samples)

    assert (found.low, found.high) == pytest.approx((low, high), abs=0.002)


@pytest.mark.parametrize("instances", [5, 20, 50])
@pytest.mark.parametrize("truth", [0.02, 0.1, 0.5, 0.9])
def test_the_interval_of_single_samples_covers_the_truth(instances: int, truth: float) -> None:
    """Counted over every result that one sample per instance can have: at least 95 %."""
    held = 0.0
    for resolved in range(instances + 1):
        values = [1.0] * resolved + [0.0] * (instances - resolved)
        found = share_interval(values, instances)
        chance = math.comb(instances, resolved) * truth**resolved
        held += (found.low <= truth <= found.high) * chance * (1 - truth) ** (instances - resolved)

    assert held >= 0.95


@pytest.mark.parametrize("instances", [5, 20, 50])
def test_samples_that_repeat_an_instance_prove_nothing_more(instances: int) -> None:
    """Four equal samples of each instance give the interval of one, not that of four times as many
    instances."""
    values = [1.0] * (instances // 2) + [0.0] * (instances - instances // 2)
    four, one = share_interval(values, 4 * instances), share_interval(values, instances)

    assert (four.low, four.high) == pytest.approx((one.low, one.high), abs=1e-9)


@pytest.mark.parametrize("instances", [1, 2, 3, 5, 20, 50])
@pytest.mark.parametrize(
    "likeness",
    [
        pytest.param(0.3, marks=pytest.mark.longer),
        1.0,
        pytest.param(30.0, marks=pytest.mark.longer),
    ],
)
def test_the_interval_covers_the_truth(instances: int, likeness: float) -> None:
    """95 % of the intervals contain the share over all instances, however similar an instance's
    samples are (92 % of 300 drawn ones: three standard errors). The instances' shares come from a
    beta distribution."""
    drawn = random.Random(7)
    held = 0
    for _ in range(300):
        shares = [drawn.betavariate(0.6 * likeness, 0.4 * likeness) for _ in range(instances)]
        means = [sum(drawn.random() < share for _ in range(4)) / 4 for share in shares]
        found = share_interval(means, 4 * instances)
        held += found.low <= 0.6 <= found.high

    assert held >= 0.92 * 300


@pytest.mark.parametrize("instances", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("won", [0.1, 0.5])
def test_the_interval_of_a_difference_covers_the_truth(instances: int, won: float) -> None:
    """Each instance is won with this chance, lost with 0.1, otherwise tied."""
    drawn = random.Random(7)
    truth, held = won - 0.1, 0
    for _ in range(300):
        lots = [drawn.random() for _ in range(instances)]
        found = difference_interval([float(lot < won) - float(lot > 0.9) for lot in lots])
        held += found.low <= truth <= found.high

    assert held >= 0.92 * 300


def test_equal_results_prove_no_certain_difference() -> None:
    """Three ties leave an interval on both sides."""
    found = difference_interval([0.0, 0.0, 0.0])

    assert found.low < -0.3 < 0.3 < found.high


def test_nothing_has_no_interval() -> None:
    """Without instances, the result is not 0."""
    assert math.isnan(share_interval([], 0).mean)
    assert math.isnan(difference_interval([]).mean)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 0.03125), (9, 1, 0.021484375), (1, 9, 0.021484375)],
)
def test_the_paired_test_is_exact(wins: int, losses: int, p: float) -> None:
    """Two-sided binomial tails: 2 * 2^-6 for six of six, 22 / 1024 for nine of ten."""
    assert sign_test(wins, losses) == p
