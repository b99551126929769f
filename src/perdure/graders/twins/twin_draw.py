"""Picks at random, for each pair of a grading, the runs with twins and the order of all runs.

One run has originals only and is the row's own protocol. The runs with twins look the same from
inside: each is the row's own grading with another `test_patch`. Code that forges results can learn
neither which run it is in nor which of its tests are twins. If the runs of a pair tell each other what
they see, they still must guess which one has originals only: see `draw_proof.proven_draws`.
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
        """The FAIL_TO_PASS ids that are twins here; empty in a run of originals."""
        return frozenset(test for twin in self.twins for test in twin.tests)


def draw(instance: Instance, random: Random | None = None) -> list[Run]:
    """The runs of a pair in random order; none if the instance has no twins.

    Raises: InstanceError if a twin does not fit the instance's test patch.
    """
    draws = instance.grading.twin_draws
    if not draws:
        return []
    chance = random or SystemRandom()
    runs = [_run(instance, twins) for twins in ((), *chance.choice(draws).runs)]
    chance.shuffle(runs)
    return runs


def _run(instance: Instance, twins: Sequence[Twin]) -> Run:
    patch = with_twins(instance.grading.test_patch, twins)
    grading = instance.grading.model_copy(update={"test_patch": patch, "twin_draws": ()})
    return Run(instance.model_copy(update={"grading": grading}), tuple(twins))
