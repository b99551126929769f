"""Writes a run as one file for a trainer: JSON lines, or parquet if its name ends so.

Owns the file forms of `perdure.episodes.trainer_formats`. One line is one sample. For SkyRL, whose batches
are columns, one line is the `GeneratorOutput` of a group.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from perdure.episodes import trainer_formats
from perdure.episodes.demonstrations.sft_tokens import sft_rows
from perdure.episodes.episode import Episode, EpisodeSegments
from perdure.episodes.trainer_formats import Row
from perdure.types import ExpertRows

TrainerFormat = Literal["sft-tokens", "slime", "skyrl", "torchtitan", "verl"]

REPLAY_FORMATS = ("slime", "skyrl", "verl")
"""Formats of trainers that replay experts."""
PER_BATCH = ("rollout_metrics", "trajectory_time_splits")
"""Fields of SkyRL's output that describe a batch, which a parquet row cannot hold."""

IDS, FLOATS, MASK = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.int8())
TEXT, NUMBER, FLOAT, TRUTH = pa.string(), pa.int64(), pa.float64(), pa.bool_()
ARRAY = pa.struct([("dtype", TEXT), ("shape", pa.list_(NUMBER)), ("data", pa.binary())])
"""A numpy array; `data` is its bytes in C order, in JSON lines as base64."""
COLUMNS: dict[str, dict[str, pa.DataType]] = {
    "sft-tokens": {
        "input_ids": IDS,
        "labels": IDS,
        "assistant_masks": MASK,
        "instance_id": TEXT,
        "sample_index": NUMBER,
        "rollout_id": TEXT,
        "reward": FLOAT,
        "outcome": TEXT,
        "segment_kind": TEXT,
        "segment_idx": NUMBER,
        "num_segments": NUMBER,
        "chain": TEXT,
        "metadata": TEXT,
    },
    "slime": {
        "group_index": NUMBER,
        "index": NUMBER,
        "rollout_id": NUMBER,
        "prompt": TEXT,
        "tokens": IDS,
        "response": TEXT,
        "response_length": NUMBER,
        "label": TEXT,
        "reward": FLOAT,
        "loss_mask": MASK,
        "weight_versions": pa.list_(TEXT),
        "rollout_log_probs": FLOATS,
        "rollout_routed_experts": ARRAY,
        "rollout_top_p_token_ids": ARRAY,
        "rollout_top_p_token_offsets": ARRAY,
        "remove_sample": TRUTH,
        "status": TEXT,
        "session_id": TEXT,
        "metadata": TEXT,
    },
    "skyrl": {
        "prompt_token_ids": IDS,
        "response_ids": IDS,
        "rewards": FLOATS,
        "loss_masks": MASK,
        "stop_reasons": TEXT,
        "rollout_logprobs": FLOATS,
        "trajectory_ids": TEXT,
        "trajectory_generation_times": FLOAT,
        "rollout_expert_indices": ARRAY,
        "is_last_step": TRUTH,
        "env_metrics": TEXT,
    },
    "torchtitan": {
        "min_policy_version": NUMBER,
        "max_policy_version": NUMBER,
        "rollout_id": TEXT,
        "token_ids": IDS,
        "loss_mask": pa.list_(TRUTH),
        "logprobs": FLOATS,
        "advantage": FLOATS,
        "metadata": TEXT,
    },
    "verl": {
        "prompt_ids": IDS,
        "response_ids": IDS,
        "response_mask": MASK,
        "response_logprobs": FLOATS,
        "routed_experts": ARRAY,
        "reward_score": FLOAT,
        "num_turns": NUMBER,
        "metrics": TEXT,
        "extra_fields": TEXT,
    },
}
"""Columns of the parquet form; nested fields are text columns with JSON."""


class TrainerFile:
    """Writes rollouts one by one. `close` completes the file."""

    def __init__(
        self, format: TrainerFormat, episodes: Sequence[Episode], file: BinaryIO, *, parquet: bool
    ) -> None:
        self.format = format
        self._file = file
        self._indexes = {episode.rollout_id: n for n, episode in enumerate(episodes)}
        groups = dict.fromkeys(episode.group_id for episode in episodes)
        self._groups = {group: n for n, group in enumerate(groups)}
        self._advantages = trainer_formats.group_advantages(episodes)
        self._held: list[EpisodeSegments] = []
        self._schema = pa.schema(list(COLUMNS[format].items()))
        self._parquet = (
            pq.ParquetWriter(file, self._schema, compression="zstd") if parquet else None
        )

    def why_not(self, found: EpisodeSegments) -> str | None:
        """Why this rollout has no line in this format; None if it has one."""
        if self.format == "slime" and "hosted" not in found.episode.trajectory.untrained_turns:
            return None  # a failed rollout becomes slime's own aborted sample
        if why := found.episode.why_no_reward:
            return why
        if found.episode.too_stale and self.format in ("torchtitan", "sft-tokens"):
            return f"too stale: {found.episode.too_stale}"
        return None if found.segments else "nothing to train on: no turn with token ids"

    def add(self, found: EpisodeSegments) -> None:
        if self.format == "skyrl":
            self._held.append(found)
        else:
            self._write(self._rows(found))

    def close(self) -> None:
        for _, group in groupby(self._held, key=lambda one: one.episode.group_id):
            output = trainer_formats.skyrl_output(list(group))
            self._write(list(_transposed(output)) if self._parquet else [output])
        if self._parquet is not None:
            self._parquet.close()

    def _rows(self, found: EpisodeSegments) -> list[Row]:
        episode = found.episode
        group = self._groups[episode.group_id]
        if self.format == "sft-tokens":
            return sft_rows(found)
        if self.format == "slime":
            index = self._indexes[episode.rollout_id]
            return trainer_formats.slime_samples(found, index=index, group_index=group)
        if self.format == "torchtitan":
            advantage = self._advantages[episode.rollout_id]
            return trainer_formats.torchtitan_samples(found, group_id=group, advantage=advantage)
        return trainer_formats.verl_outputs(found)

    def _write(self, rows: Sequence[Row]) -> None:
        if self._parquet is None:
            for row in rows:
                self._file.write(json.dumps(row, default=_json_array).encode() + b"\n")
        elif rows:
            flat = [{name: _flat(row.get(name)) for name in self._schema.names} for row in rows]
            self._parquet.write_table(pa.Table.from_pylist(flat, schema=self._schema))


def _transposed(output: Row) -> Iterator[Row]:
    columns = [
        name for name, value in output.items() if value is not None and name not in PER_BATCH
    ]
    for values in zip(*(output[name] for name in columns), strict=True):
        yield dict(zip(columns, values, strict=True))


def _flat(value: Any) -> Any:
    if hasattr(value, "dtype"):
        return _array(value)
    return json.dumps(value) if isinstance(value, dict) else value


def _array(value: ExpertRows) -> Row:
    return {"dtype": value.dtype.name, "shape": value.shape, "data": value.tobytes()}


def _json_array(value: ExpertRows) -> Row:
    return _array(value) | {"data": base64.b64encode(value.tobytes()).decode("ascii")}
