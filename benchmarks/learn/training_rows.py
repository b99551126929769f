"""Turns episodes into the input of a GRPO step: ids, mask, logprobs, temperature, advantage.

All values are copied from the episode's segments. Only this module makes the three errors that
`Plan.broken` names.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from benchmarks.learn.training_plan import Broken
from perdure.episodes.episode import EpisodeSegments
from perdure.types import Segment

Encode = Callable[[Sequence[int]], Sequence[int]]
"""Maps ids to the ids of their text."""


@dataclass(frozen=True)
class Sample:
    """One sequence. Shapes: ids, mask, logprobs all [L]; a logprob counts where the mask is 1.

    A logprob is nan if the engine's is unknown. Then the trainer's own logprob counts, as in a trainer
    that recomputes it.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float = 1.0
    advantage: float = 0.0


def samples_of(
    groups: Sequence[Sequence[EpisodeSegments]], broken: Broken, reencode: Encode
) -> list[Sample]:
    """All segments of groups whose rewards differ, with GRPO's advantage per rollout."""
    if broken == "split":
        return [sample for group in groups for sample in _split(group)]
    found = []
    for group in groups:
        graded = [one for one in group if one.episode.reward is not None]
        for one, advantage in zip(graded, advantages(list(map(_reward, graded))), strict=True):
            if advantage:
                found += [replace(sample(s), advantage=advantage) for s in one.segments]
    if broken == "reencode":
        return [reencoded(one, reencode) for one in found]
    if broken == "temperature":
        return [replace(one, temperature=1.0) for one in found]
    return found


def _reward(found: EpisodeSegments) -> float:
    return found.episode.reward or 0.0


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / std; 0 for all if the rewards are equal."""
    spread = statistics.pstdev(rewards) if rewards else 0.0
    mean = statistics.fmean(rewards) if rewards else 0.0
    return [(reward - mean) / spread if spread else 0.0 for reward in rewards]


def sample(segment: Segment) -> Sample:
    """Raises: ValueError if the temperature of the segment's tokens was not recorded."""
    if segment.temperature is None:
        raise ValueError("a segment does not have exactly one known temperature")
    before = len(segment.prompt_ids)
    return Sample(
        ids=(*segment.prompt_ids, *segment.response_ids),
        mask=(*[0] * before, *segment.loss_mask),
        logprobs=(*[0.0] * before, *segment.logprobs),
        temperature=segment.temperature,
    )


# --- broken on purpose --------------------------------------------------------------------------


def _split(group: Sequence[EpisodeSegments]) -> list[Sample]:
    """Each answer as its own segment with 1/K of the reward, and one baseline over all segments."""
    graded = [one for one in group if one.episode.reward is not None]
    pieces = [(one, turns(sample(s))) for one in graded for s in one.segments]
    shares = [_reward(one) / len(cut) for one, cut in pieces for _ in cut]
    cuts = [cut for _, several in pieces for cut in several]
    pairs = zip(cuts, advantages(shares), strict=True)
    return [replace(cut, advantage=advantage) for cut, advantage in pairs if advantage]


def turns(whole: Sample) -> list[Sample]:
    """For each answer: all tokens up to its end, with only that answer trained."""
    found = []
    for start, end, trained in _runs(whole.mask):
        if trained:
            mask = (*[0] * start, *[1] * (end - start))
            found.append(
                replace(whole, ids=whole.ids[:end], mask=mask, logprobs=whole.logprobs[:end])
            )
    return found


def reencoded(whole: Sample, reencode: Encode) -> Sample:
    """Decode and encode each stretch again. Where ids change, the engine's logprobs no longer match."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for start, end, trained in _runs(whole.mask):
        before, again = whole.ids[start:end], tuple(reencode(whole.ids[start:end]))
        ids += again
        mask += [trained] * len(again)
        logprobs += whole.logprobs[start:end] if again == before else [math.nan] * len(again)
    return replace(whole, ids=tuple(ids), mask=tuple(mask), logprobs=tuple(logprobs))


def _runs(mask: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, value) of each stretch of equal values."""
    start = 0
    for value, run in groupby(mask):
        end = start + len(list(run))
        yield start, end, value
        start = end
