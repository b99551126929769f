"""The instances and the weight version of each batch, and the learning rate of each step."""

import random

from benchmarks.learn.training_plan import Plan

WARM_UP_STEPS = 3
LAST_SHARE = 0.2
"""The share of the learning rate at the last step."""


def batch(plan: Plan, number: int) -> tuple[str, ...]:
    """The instances of a batch. Each epoch goes through all of them in its own order."""
    start = number * plan.groups
    return tuple(_at(plan, position) for position in range(start, start + plan.groups))


def _at(plan: Plan, position: int) -> str:
    epoch, place = divmod(position, len(plan.training))
    order = list(plan.training)
    random.Random(plan.seed * 1000 + epoch).shuffle(order)
    return order[place]


def version_of(plan: Plan, number: int, first: int) -> int:
    """The version that is published when the batch starts, `staleness` steps before it is trained."""
    return first + max(0, number - plan.staleness)


def learning_rate(plan: Plan, number: int) -> float:
    """Warm-up, then constant for half of the steps, then linear decay, so that the end is steady."""
    half = plan.steps / 2
    left = min(1.0, (plan.steps - number) / half)
    share = LAST_SHARE + (1 - LAST_SHARE) * left
    return plan.learning_rate * share * min(1.0, (number + 1) / WARM_UP_STEPS)


def evaluates(plan: Plan, done: int) -> bool:
    """Whether held-out instances are evaluated after this many steps."""
    return done % plan.evaluate_every == 0 or done == plan.steps
