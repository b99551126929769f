"""Finished rollouts as padded arrays, for a training loop of your own.

Ids, masks, logprobs and versions are copied from the segments. Which rollouts count, and their
advantages, are those of `trainer_formats`. This module needs numpy, from the extra `trainer`.
"""

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy
from numpy.typing import NDArray

from perdure.episodes.episode import Episode, EpisodeSegments
from perdure.episodes.trainer_formats import NO_VERSION, graded, group_advantages
from perdure.types import Segment

Array = TypeVar("Array")
Values = NDArray[Any]

OF_TOKENS: dict[str, tuple[Any, Any]] = {
    "tokens": (numpy.int64, 0),
    "mask": (numpy.bool_, False),
    "logprobs": (numpy.float32, 0.0),
    "versions": (numpy.int64, NO_VERSION),
}
"""The dtype of each array [N, T], and its value in the padding."""
OF_ROWS = ("lengths", "rewards", "advantages", "rollouts", "groups")


@dataclass(frozen=True, eq=False)
class Batch(Generic[Array]):
    """One row per segment of each graded rollout, padded on the right to the longest of the batch.

    A rollout that has no reward or no token ids, or is too stale, has no row. One without a reward
    does not count in its group's mean either: its reward is not 0. One that is too stale does count.
    A rollout of K segments has K rows with the same reward and advantage: if your loss takes a mean
    over rows, divide by the rows of `rollouts`.

    Shapes: N rows, T tokens in the longest one; both are 0 if no rollout has a reward. The arrays
    are numpy's; `torch()` makes tensors of them.

    Example of two rollouts, of which the first one has two turns:
        tokens     [[11, 12, 21, 31, 22], [11, 12, 23, 0, 0]]
        mask       [[F, F, T, F, T], [F, F, T, F, F]]
        logprobs   [[0, 0, -0.5, 0, -0.25], [0, 0, -1.5, 0, 0]]
        versions   [[-1, -1, 7, -1, 8], [-1, -1, 7, -1, -1]]
        lengths, rewards, advantages, rollouts, groups
                   [5, 3], [1, 0], [0.707, -0.707], [0, 1], [0, 0]
    """

    tokens: Array
    """int64 [N, T]. Prompt and response; 0 in the padding."""
    mask: Array
    """bool [N, T]. The policy sampled this token: train on it."""
    logprobs: Array
    """float32 [N, T]. The logprob of `tokens[n, t]` with which it was sampled, given the tokens
    before it. 0 where the mask is false."""
    versions: Array
    """int64 [N, T]. The policy version that sampled the token; -1 if unknown, or where the mask is
    false."""
    lengths: Array
    """int64 [N]. Tokens of the row without padding."""
    rewards: Array
    """float32 [N]. The rollout's whole reward."""
    advantages: Array
    """float32 [N]. GRPO's (reward - mean) / (std + 1e-6) over the graded rollouts of the group
    (arXiv 2402.03300, 4.1.2; sample standard deviation), or the reward minus the mean with
    `std_normalization=False`. 0 in a group with equal rewards."""
    rollouts: Array
    """int64 [N]. The row's rollout, as an index into `episodes`."""
    groups: Array
    """int64 [N]. The row's group, as an index into `group_ids`."""
    group_ids: tuple[str, ...]
    episodes: tuple[Episode, ...]
    """All rollouts of the groups, also those without a row: status, outcome, failure, times."""

    def torch(self, device: Any = None) -> "Batch[Any]":
        """The same batch with tensors, on the CPU without a copy."""
        import torch

        names = (*OF_TOKENS, *OF_ROWS)
        tensors = {name: torch.as_tensor(getattr(self, name), device=device) for name in names}
        return replace(self, **tensors)


class BatchBuilder:
    """Collects rollouts as arrays, so that their larger Python objects can be freed."""

    def __init__(self, *, std_normalization: bool = True) -> None:
        self._std_normalization = std_normalization
        self._episodes: list[Episode] = []
        self._rows: list[tuple[int, dict[str, Values]]] = []
        """(index of the rollout, arrays [L])."""

    def add(self, found: EpisodeSegments) -> None:
        """`found`: all segments of a rollout, whether it is graded or not."""
        index = len(self._episodes)
        self._episodes.append(found.episode)
        kept = [] if found.episode.too_stale else graded([found])
        self._rows += [(index, _row(segment)) for one in kept for segment in one.segments]

    def batch(self) -> Batch[Values]:
        group_ids = tuple(dict.fromkeys(episode.group_id for episode in self._episodes))
        advantages = group_advantages(self._episodes, std_normalization=self._std_normalization)
        members = [self._episodes[index] for index, _ in self._rows]
        return Batch(
            **{name: self._padded(name) for name in OF_TOKENS},
            lengths=_integers([len(row["tokens"]) for _, row in self._rows]),
            rewards=_floats([episode.reward for episode in members]),
            advantages=_floats([advantages[episode.rollout_id] for episode in members]),
            rollouts=_integers([index for index, _ in self._rows]),
            groups=_integers([group_ids.index(episode.group_id) for episode in members]),
            group_ids=group_ids,
            episodes=tuple(self._episodes),
        )

    def _padded(self, name: str) -> Values:
        """Shape [N, T]."""
        dtype, fill = OF_TOKENS[name]
        longest = max((len(row[name]) for _, row in self._rows), default=0)
        padded = numpy.full((len(self._rows), longest), fill, dtype)
        for place, (_, row) in zip(padded, self._rows, strict=True):
            place[: len(row[name])] = row[name]
        return padded


def _row(segment: Segment) -> dict[str, Values]:
    """Shapes [P + R]."""
    values = {
        "tokens": segment.response_ids,
        "mask": segment.loss_mask,
        "logprobs": segment.logprobs,
        "versions": segment.versions,
    }
    row = {}
    for name, (dtype, fill) in OF_TOKENS.items():
        prompt = segment.prompt_ids if name == "tokens" else (fill,) * len(segment.prompt_ids)
        row[name] = numpy.array((*prompt, *values[name]), dtype)
    return row


def _integers(values: list[int]) -> Values:
    return numpy.array(values, numpy.int64)


def _floats(values: list[Any]) -> Values:
    return numpy.array(values, numpy.float32)
