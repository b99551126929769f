"""Statistics of each named reward over the graded rollouts of a run, and inside its groups."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from perdure.reports.rollout_facts import RolloutFacts


@dataclass(frozen=True)
class NamedReward:
    """One reward over the rollouts that have it. A group is an instance with several of them."""

    rollouts: int
    mean: float
    least: float
    most: float
    groups: int
    groups_that_differ: int
    """Groups whose samples differ. Without a difference, GRPO has no advantage."""
    group_deviation: float
    """Mean over groups of the sample standard deviation; nan without groups."""


def named_reward_statistics(graded: Iterable[RolloutFacts]) -> dict[str, NamedReward]:
    """By name, in the order in which the names first occur."""
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in graded:
        for name, value in one.named_rewards.items():
            found[name][one.instance].append(value)
    return {name: _of(list(values.values())) for name, values in found.items()}


def _of(by_instance: list[list[float]]) -> NamedReward:
    values = [value for samples in by_instance for value in samples]
    groups = [samples for samples in by_instance if len(samples) > 1]
    return NamedReward(
        rollouts=len(values),
        mean=statistics.fmean(values),
        least=min(values),
        most=max(values),
        groups=len(groups),
        groups_that_differ=sum(len(set(samples)) > 1 for samples in groups),
        group_deviation=statistics.fmean(map(statistics.stdev, groups)) if groups else math.nan,
    )
