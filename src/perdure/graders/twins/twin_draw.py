"""Flips the host's coin: for each grading, draws the twins and the run that holds each original.

Both runs of a pair look the same from inside: each is the row's own grading with another
`test_patch`. Each F2P test with twins is the original in one run and a twin in the other. Code that
forges results can learn neither the coin nor the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from secrets import SystemRandom

from perdure.graders.twins.patch_lines import with_twins
from perdure.types import Instance, Twin


@dataclass(frozen=True)
class Run:
    """A run of the hidden tests: the instance that its grader gets, and the twins in it."""

    instance: Instance
    twins: tuple[Twin, ...] = ()

    @property
    def twin_test_ids(self) -> frozenset[str]:
        """The FAIL_TO_PASS ids that are twins here."""
        return frozenset(test for twin in self.twins for test in twin.tests)


Pair = tuple[Run, Run]


def draw(instance: Instance, pairs: int, random: Random | None = None) -> list[Pair]:
    """Draw `pairs` pairs of runs, in the order in which they run; none if the instance has no
    twins.

    Raises: InstanceError if a twin does not fit the instance's test patch.
    """
    if not instance.grading.twins:
        return []
    chance = random or SystemRandom()
    return [_pair(instance, chance) for _ in range(pairs)]


def _pair(instance: Instance, chance: Random) -> Pair:
    sides: tuple[list[Twin], list[Twin]] = ([], [])
    for twins in pools(instance.grading.twins):
        sides[chance.randrange(2)].append(chance.choice(twins))
    return _run(instance, sides[0]), _run(instance, sides[1])


def _run(instance: Instance, twins: Sequence[Twin]) -> Run:
    patch = with_twins(instance.grading.test_patch, twins)
    grading = instance.grading.model_copy(update={"test_patch": patch, "twins": ()})
    return Run(instance.model_copy(update={"grading": grading}), tuple(twins))


def pools(twins: Sequence[Twin]) -> list[list[Twin]]:
    """The twins of each test function, which have the same ids."""
    found: dict[tuple[str, ...], list[Twin]] = {}
    for twin in twins:
        found.setdefault(twin.tests, []).append(twin)
    return list(found.values())
