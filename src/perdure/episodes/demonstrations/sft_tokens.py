"""Converts segments to an SFT trainer's rows: all ids, and which of them to train."""

from typing import Any

from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainer_formats import sampling_facts
from perdure.types import Segment

IGNORE_INDEX = -100
"""The label that torch's cross entropy ignores."""


def sft_rows(found: EpisodeSegments) -> list[dict[str, Any]]:
    """One row per segment. Shapes: `input_ids`, `labels`, `assistant_masks` are all [P + R].

    Example:
        {"input_ids": [1, 2, 4], "labels": [-100, -100, 4], "assistant_masks": [0, 0, 1], "reward": 1.0, ...}
    """
    return [_row(found, segment) for segment in found.segments]


def _row(found: EpisodeSegments, segment: Segment) -> dict[str, Any]:
    episode = found.episode
    ids = (*segment.prompt_ids, *segment.response_ids)
    mask = (*(0 for _ in segment.prompt_ids), *segment.loss_mask)
    return {
        "input_ids": list(ids),
        "labels": [
            one if trained else IGNORE_INDEX for one, trained in zip(ids, mask, strict=True)
        ],
        "assistant_masks": list(mask),
        "instance_id": episode.instance_id,
        "sample_index": episode.sample_index,
        "rollout_id": episode.rollout_id,
        "reward": episode.reward,
        "outcome": episode.outcome.value if episode.outcome else None,
        "segment_kind": segment.kind.value,
        "segment_idx": segment.index,
        "num_segments": len(found.segments),
        "chain": segment.chain,
        "metadata": sampling_facts(segment) | episode.audit(),
    }
