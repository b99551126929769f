"""What the parity benchmark makes of recorded and recomputed logprobs."""

import math

import pytest

from benchmarks.parity.parity_figures import Difference, figures
from benchmarks.parity.scorer_process import Scored
from perdure.types import Turn


def turn(*logprobs: float, ids: tuple[int, ...] = (7, 8)) -> Turn:
    return Turn(index=0, prompt_ids=(1, 2), completion_ids=ids, logprobs=logprobs)


def scored(*logprobs: float, likeliest: tuple[int, ...] = (7, 8), behind: float = 0.0) -> Scored:
    return Scored(list(logprobs), list(likeliest), [behind] * len(logprobs))


def test_the_ratio_of_a_turn_is_the_product_of_its_tokens() -> None:
    """Ratios are the trainer's probability over the recorded one, token by token and turn by turn."""
    found = figures(
        "sampled",
        "float32",
        [turn(-1.0, -2.0), turn(-1.0, -1.0)],
        [scored(-0.9, -1.8), scored(-1.1, -1.0)],
    )

    assert (found.ratio[0], found.ratio[-1]) == pytest.approx((math.exp(-0.1), math.exp(0.2)))
    assert found.turn_ratio == pytest.approx((math.exp(-0.1), math.exp(0.3)))
    assert (found.mean, found.max) == pytest.approx((0.1, 0.2))


def test_k3_is_zero_for_equal_logprobs_and_positive_whatever_the_sign() -> None:
    """A token that the trainer finds likelier and one that it finds less likely do not cancel."""
    equal = figures("sampled", "float32", [turn(-1.0, -2.0)], [scored(-1.0, -2.0)])
    apart = figures("sampled", "float32", [turn(-1.0, -2.0)], [scored(-1.5, -1.7)])

    assert equal.k3 == 0.0
    assert apart.k3 == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(0.3) - 1.3) / 2)


def test_a_greedy_turn_differs_at_its_first_other_id() -> None:
    """What follows the first difference was sampled after another text: it is not counted."""
    same, other = scored(-1.0, -2.0), scored(-1.0, -2.0, likeliest=(9, 9), behind=0.25)

    found = figures("greedy", "bfloat16", [turn(-1.0, -2.0), turn(-1.0, -2.0)], [same, other])

    assert found.differences == (Difference(turn=1, position=0, behind=0.25),)
    assert found.k3 is None


def test_a_token_that_was_not_scored_is_an_error() -> None:
    """A short answer must not be paired with the wrong tokens."""
    with pytest.raises(ValueError, match="zip"):
        figures("sampled", "float32", [turn(-1.0, -2.0)], [scored(-1.0)])
