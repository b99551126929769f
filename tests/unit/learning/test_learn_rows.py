"""What a GRPO step of `make learn` gets, right and broken on purpose."""

import math
from pathlib import Path

import pytest

from benchmarks.learn.batch_schedule import batch, evaluates, learning_rate, version_of
from benchmarks.learn.training_plan import Plan
from benchmarks.learn.training_rows import Sample, advantages, reencoded, turns

WHOLE = Sample(
    ids=(1, 2, 3, 4, 5, 6),
    mask=(0, 1, 1, 0, 1, 1),
    logprobs=(0.0, -0.1, -0.2, 0.0, -0.4, -0.5),
)


def _plan(staleness: int = 0) -> Plan:
    return Plan(
        name="try",
        folder=Path(),
        base=Path(),
        canary_rows=Path(),
        training=tuple(f"repairs/train-{n}" for n in range(10)),
        held_out=(),
        groups=4,
        staleness=staleness,
    )


def test_a_group_without_variance_has_no_advantage() -> None:
    assert advantages([1.0, 1.0]) == advantages([0.0, 0.0]) == [0.0, 0.0]


def test_advantages_are_in_units_of_the_groups_spread() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]


def test_split_trains_each_answer_once() -> None:
    """The error on purpose is the reward, not the mask."""
    first, second = turns(WHOLE)

    assert (first.ids, first.mask) == ((1, 2, 3), (0, 1, 1))
    assert (second.ids, second.mask) == (WHOLE.ids, (0, 0, 0, 0, 1, 1))


def test_a_logprob_stays_only_where_its_tokens_stay() -> None:
    """5, 6 become one other token: the engine's logprobs of them mean nothing for it."""
    found = reencoded(WHOLE, lambda ids: [9] if tuple(ids) == (5, 6) else ids)

    assert (found.ids, found.mask) == ((1, 2, 3, 4, 9), (0, 1, 1, 0, 1))
    assert found.logprobs[:4] == WHOLE.logprobs[:4]
    assert math.isnan(found.logprobs[4])


def test_an_epoch_has_every_instance_once() -> None:
    """Also where a batch goes over the end of an epoch."""
    plan = _plan()
    seen = [one for number in range(5) for one in batch(plan, number)]

    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(plan.training)
    assert seen[:10] != seen[10:]


@pytest.mark.parametrize(
    ("staleness", "versions"), [(0, [7, 8, 9]), (1, [7, 7, 8]), (2, [7, 7, 7])]
)
def test_a_stale_batch_is_sampled_by_earlier_weights(staleness: int, versions: list[int]) -> None:
    """The first batches are sampled before there are newer weights."""
    assert [version_of(_plan(staleness), number, 7) for number in range(3)] == versions


def test_the_learning_rate_warms_up_stays_and_falls() -> None:
    """At the end small steps, so that the last rewards are those of a settled model."""
    plan = _plan().model_copy(update={"steps": 40, "learning_rate": 1e-3})
    rates = [round(1e4 * learning_rate(plan, number), 2) for number in (0, 2, 20, 30, 39)]

    assert rates == [3.33, 10.0, 10.0, 6.0, 2.4]


def test_held_out_instances_are_tried_at_both_ends_and_between() -> None:
    plan = _plan().model_copy(update={"steps": 50, "evaluate_every": 20})

    assert [done for done in range(51) if evaluates(plan, done)] == [0, 20, 40, 50]
