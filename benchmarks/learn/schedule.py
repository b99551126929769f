"""Which instances a batch has, and which version of the weights samples it."""

import random

from benchmarks.learn.plan import Plan


def batch(plan: Plan, number: int) -> tuple[str, ...]:
    """The instances of a batch: every epoch goes through all of them in an order of its own."""
    start = number * plan.groups
    return tuple(_at(plan, position) for position in range(start, start + plan.groups))


def _at(plan: Plan, position: int) -> str:
    epoch, place = divmod(position, len(plan.training))
    order = list(plan.training)
    random.Random(plan.seed * 1000 + epoch).shuffle(order)
    return order[place]


def version_of(plan: Plan, number: int, first: int) -> int:
    """The version published when the batch is started, `staleness` steps before it is trained on."""
    return first + max(0, number - plan.staleness)
