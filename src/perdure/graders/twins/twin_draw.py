"""Flips the host's coins: for each grading, picks the runs with twins and the order of all runs.

One run has originals only and is the row's own protocol. The runs with twins look the same from
inside: each is the row's own grading with another `test_patch`. Code that forges results can learn
neither which run it is in nor which of its tests are twins.
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


def draw(instance: Instance, pairs: int, random: Random | None = None) -> list[Run]:
    """The runs of a grading in random order; none if the instance has no twins or `pairs` is 0.

    Each pair checks every test that has a twin once as a twin and once as an original. If the twins
    of a draw share one run, a run of originals completes the pair. If they are divided between two
    runs, the second pair needs no further run of originals.

    Raises: InstanceError if a twin does not fit the instance's test patch.
    """
    draws = instance.grading.twin_draws
    if not draws:
        return []
    chance = random or SystemRandom()
    runs: list[Run] = []
    for number in range(pairs):
        drawn = chance.choice(draws)
        if number == 0 or len(drawn.runs) == 1:
            runs.append(_run(instance, ()))
        runs += [_run(instance, twins) for twins in drawn.runs]
    chance.shuffle(runs)
    return runs


def _run(instance: Instance, twins: Sequence[Twin]) -> Run:
    patch = with_twins(instance.grading.test_patch, twins)
    grading = instance.grading.model_copy(update={"test_patch": patch, "twin_draws": ()})
    return Run(instance.model_copy(update={"grading": grading}), tuple(twins))
