"""A stored episode with its token arrays: what every trainer's format is made from.

Owns reading segments back. Nothing is tokenised: the ids come from `episode.parquet`, or, where
segments are to be cut by other rules, from the recorded turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from perdure.episodes import turns
from perdure.episodes.episode import Episode
from perdure.episodes.segments import RewardShare, SegmentMode, cut, share
from perdure.storage.base import Store
from perdure.types import FinishReason, Segment, SegmentKind


@dataclass(frozen=True)
class EpisodeSegments:
    """One rollout as trainers take it: its episode and its segments, in order."""

    episode: Episode
    segments: tuple[Segment, ...]

    def reward_of(self, segment: Segment) -> float | None:
        """The segment's share; None when the rollout was not graded. Never 0 for "unknown"."""
        reward = self.episode.reward
        return None if reward is None else reward * segment.reward_share

    def shared(self, reward_share: RewardShare) -> "EpisodeSegments":
        """The same, its reward given out by another rule."""
        count = len(self.segments)
        segments = tuple(
            segment.model_copy(update={"reward_share": share(reward_share, segment.index, count)})
            for segment in self.segments
        )
        return replace(self, segments=segments)


async def read_segments(
    store: Store,
    episode: Episode,
    *,
    mode: SegmentMode = "tree",
    reward_share: RewardShare = "split",
) -> EpisodeSegments:
    """Raises: NotFound when its arrays are not in the store; ValueError when they are unreadable."""
    if mode == "tree":
        found = _from_tokens((await store.get(episode.tokens_key)).data, episode.tokens_key)
    elif episode.turns_key is None:
        found = []
    else:
        recorded = turns.decode((await store.get(episode.turns_key)).data)
        found = cut(recorded, mode=mode)
    return EpisodeSegments(episode, tuple(found)).shared(reward_share)


def _from_tokens(data: bytes, key: str) -> list[Segment]:
    try:
        rows = pq.read_table(pa.BufferReader(data)).to_pylist()
        return [_segment(row) for row in rows if row["segment_kind"] is not None]
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(f"{key} is unreadable: {error}") from error


def _segment(row: dict[str, Any]) -> Segment:
    arrays = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "turns")
    return Segment(
        kind=SegmentKind(row["segment_kind"]),
        index=row["segment_index"],
        chain=row["chain"],
        finish_reason=FinishReason(row["finish_reason"]),
        **{name: tuple(row[name]) for name in arrays},
    )


def graded(found: Sequence[EpisodeSegments]) -> list[EpisodeSegments]:
    """Those with a verdict and something to train on."""
    return [one for one in found if one.episode.reward is not None and one.segments]
