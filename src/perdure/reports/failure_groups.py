"""Groups failed rollouts by boundary and by error message."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from perdure.reports.rollout_facts import RolloutFacts
from perdure.types.results import SENTENCE


@dataclass(frozen=True)
class FailureGroup:
    """Failures with the same message."""

    boundary: str
    type: str
    count: int
    sentence: str
    """The message of the first one."""
    examples: tuple[str, ...]
    """`<instance>/<sample>` of the first three."""


def failure_groups(rollouts: Iterable[RolloutFacts]) -> list[FailureGroup]:
    """The groups, the most frequent first."""
    alike: defaultdict[tuple[str, str, str], list[RolloutFacts]] = defaultdict(list)
    for one in rollouts:
        if one.failure is not None:
            alike[one.failure.likeness].append(one)
    groups = [_group(found) for found in alike.values()]
    return sorted(groups, key=lambda group: (-group.count, group.boundary, group.sentence))


def _group(found: list[RolloutFacts]) -> FailureGroup:
    first = found[0].failure
    assert first is not None, "only failures are grouped"
    return FailureGroup(
        boundary=first.boundary.value,
        type=first.type,
        count=len(found),
        sentence=_sentence(first.message),
        examples=tuple(one.name for one in found[:3]),
    )


def _sentence(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= SENTENCE else f"{line[: SENTENCE - 1]}…"
