"""Encodes segments as `episode.parquet`: arrays of token ids, masks, logprobs and versions.

Owns that file's format; `episode_store` stores it.
"""

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from perdure.episodes.episode import Episode, trained
from perdure.episodes.turns_parquet import columns_of, parquet_writer_options
from perdure.types import FinishReason, SamplingSpan, Segment, SegmentKind

TOKENS_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("instance_id", pa.string()),
        ("sample_index", pa.int32()),
        ("rollout_id", pa.string()),
        ("segment_kind", pa.string()),
        ("segment_index", pa.int32()),
        ("num_segments", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("reward", pa.float64()),
        ("rollout_reward", pa.float64()),
        ("status", pa.string()),
        ("outcome", pa.string()),
        ("finish_reason", pa.string()),
        ("trainable", pa.bool_()),
        ("chain", pa.string()),
        ("turns", pa.list_(pa.int32())),
        ("sampling", pa.list_(pa.struct(columns_of(SamplingSpan)))),
    ],
    metadata={b"perdure.episode": b"1"},
)
"""One row per segment; a rollout without segments has one row with empty arrays and no kind.
`reward` is the segment's share of `rollout_reward`; both are null if the rollout was not graded or its reward is withheld."""
ARRAYS = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "turns")
"""Columns that `Segment` has under the same name."""


def encode_segments(episode: Episode, segments: Sequence[Segment]) -> bytes:
    """The segments as parquet, masked if the rollout is too stale; at least one row."""
    kept = trained(segments, episode.too_stale)
    rows = [_row(episode, segment) for segment in kept] or [_row(episode, None)]
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows, TOKENS_SCHEMA)
    pq.write_table(table, sink, **parquet_writer_options(TOKENS_SCHEMA))
    return sink.getvalue()


def _row(episode: Episode, segment: Segment | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": episode.run_id,
        "group_id": episode.group_id,
        "instance_id": episode.instance_id,
        "sample_index": episode.sample_index,
        "rollout_id": episode.rollout_id,
        "num_segments": len(episode.segments),
        "rollout_reward": episode.reward,
        "reward": episode.reward,
        "status": episode.status.value,
        "outcome": episode.outcome and episode.outcome.value,
        "trainable": episode.trainable,
    }
    if segment is None:
        return row | {"segment_index": 0} | dict.fromkeys(ARRAYS, ())
    share = None if episode.reward is None else episode.reward * segment.reward_share
    return row | {
        "segment_kind": segment.kind.value,
        "segment_index": segment.index,
        "chain": segment.chain,
        "reward": share,
        "finish_reason": segment.finish_reason.value,
        "sampling": [span.model_dump() for span in segment.sampling],
        **{name: getattr(segment, name) for name in ARRAYS},
    }


def decode_segments(data: bytes, key: str) -> list[Segment]:
    """The segments that `encode_segments` wrote, without their reward shares, which are not stored.

    Raises: ValueError naming `key` when `data` cannot be read.
    """
    try:
        rows = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False).to_pylist()
        return [_segment(row) for row in rows if row["segment_kind"] is not None]
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(f"{key} is unreadable: {error}") from error


def _segment(row: dict[str, Any]) -> Segment:
    return Segment(
        kind=SegmentKind(row["segment_kind"]),
        index=row["segment_index"],
        chain=row["chain"],
        finish_reason=FinishReason(row["finish_reason"]),
        sampling=tuple(map(SamplingSpan.model_validate, row.get("sampling") or ())),
        **{name: tuple(row[name]) for name in ARRAYS},
    )


def with_all_columns(table: pa.Table) -> pa.Table:
    """Convert a stored table to this version's schema; columns that it lacks become null.

    Raises: pa.ArrowException, ValueError when it cannot be converted.
    """
    for field in TOKENS_SCHEMA:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(TOKENS_SCHEMA.names).cast(TOKENS_SCHEMA)
