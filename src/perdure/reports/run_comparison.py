"""Compares two runs, paired by instance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.reports.report_statistics import Interval, difference_interval, sign_test
from perdure.reports.rollout_facts import RESOLVED, RunFacts


@dataclass(frozen=True)
class Comparison:
    """The second run compared with the first, over instances that both graded.

    An instance is won if the second run resolved a larger share of its samples.
    """

    first: str
    second: str
    instances: int
    difference: Interval
    """Mean difference of the resolved shares, second minus first."""
    won: int
    lost: int
    p: float
    """p of the exact sign test; with one sample per instance, it is McNemar's exact test."""
    won_examples: tuple[str, ...]
    lost_examples: tuple[str, ...]
    only_in_first: int
    only_in_second: int


def compare(first: RunFacts, second: RunFacts) -> Comparison:
    before, after = shares(first), shares(second)
    both = [instance for instance in before if instance in after]
    differences = [after[instance] - before[instance] for instance in both]
    won = [name for name, change in zip(both, differences, strict=True) if change > 0]
    lost = [name for name, change in zip(both, differences, strict=True) if change < 0]
    return Comparison(
        first=first.run_id,
        second=second.run_id,
        instances=len(both),
        difference=difference_interval(differences),
        won=len(won),
        lost=len(lost),
        p=sign_test(len(won), len(lost)),
        won_examples=tuple(won[:10]),
        lost_examples=tuple(lost[:10]),
        only_in_first=len(before) - len(both),
        only_in_second=len(after) - len(both),
    )


def shares(run: RunFacts) -> dict[str, float]:
    """Instance id -> the resolved share of its graded samples."""
    return {name: sum(tried) / len(tried) for name, tried in resolved_samples(run).items()}


def first_resolved_samples(run: RunFacts) -> Mapping[str, Sequence[bool]]:
    """As `resolved_samples`, but with each rollout's first verdict, from before any retry."""
    tries: dict[str, list[bool]] = {}
    for one in run.rollouts:
        if one.graded:
            first = (*one.earlier_outcomes, one.outcome)[0]
            tries.setdefault(one.instance_id, []).append(first == RESOLVED)
    return tries


def resolved_samples(run: RunFacts) -> Mapping[str, Sequence[bool]]:
    """Instance id -> whether each graded sample is resolved."""
    tries: dict[str, list[bool]] = {}
    for one in run.rollouts:
        if one.graded:
            tries.setdefault(one.instance_id, []).append(one.resolved)
    return tries
