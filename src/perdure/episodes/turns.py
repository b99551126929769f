"""Turns as parquet: token ids, logprobs and versions as arrays, exactly as they were captured.

Owns the file format that the gateway writes when a session closes and episodes are built from.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from perdure.types import EngineSpan, FinishReason, Purpose, Turn, VersionSpan

FORMAT = b"perdure.turns"
VERSION = b"2"
GROUP_IDS = 1 << 18
"""Ids written at once: a row group."""
SCHEMA = pa.schema(
    [
        ("index", pa.int32()),
        ("chain", pa.string()),
        ("parent_chain", pa.string()),
        ("parent", pa.int32()),
        ("purpose", pa.string()),
        ("replayed_from", pa.string()),
        ("new_messages", pa.string()),
        ("answer", pa.string()),
        # A prompt starts with this many ids of its parent turn (its prompt, then its completion).
        ("prompt_kept", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        (
            "versions",
            pa.list_(
                pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
            ),
        ),
        ("finish_reason", pa.string()),
        ("engine", pa.string()),
        (
            "engines",
            pa.list_(
                pa.struct(
                    [
                        ("engine", pa.string()),
                        ("generation", pa.int64()),
                        ("start", pa.int32()),
                        ("end", pa.int32()),
                    ]
                )
            ),
        ),
        ("bridged", pa.bool_()),
        ("bridge_miss", pa.string()),
        ("trainable", pa.bool_()),
        ("started_at", pa.float64()),
        ("engine_seconds", pa.float64()),
        ("seconds", pa.float64()),
        ("request_sha256", pa.string()),
    ],
    metadata={FORMAT: VERSION},
)


class Delta(NamedTuple):
    """A turn as the file holds it: `prompt_ids` are those behind the first `kept` ids of its parent
    turn (its prompt, then its completion)."""

    turn: Turn
    kept: int


def encode(turns: Sequence[Turn]) -> bytes:
    """One row a turn; each prompt as what it adds to its parent turn, so the file stays linear."""
    return encode_deltas(_deltas(turns))


def encode_deltas(deltas: Iterable[Delta]) -> bytes:
    """As `encode`, for a writer that holds no whole prompt: a few rows are in memory at a time."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        pending = 0
        for turn, kept in deltas:
            rows.append(_row(turn, kept))
            pending += len(turn.prompt_ids) + len(turn.completion_ids)
            if pending >= GROUP_IDS:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                rows, pending = [], 0
        writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    return sink.getvalue()


def _deltas(turns: Sequence[Turn]) -> Iterator[Delta]:
    known: dict[int | None, tuple[int, ...]] = {}
    for turn in turns:
        held = known.get(turn.parent, ())
        kept = len(held) if turn.prompt_ids[: len(held)] == held else 0
        yield Delta(turn.model_copy(update={"prompt_ids": turn.prompt_ids[kept:]}), kept)
        known[turn.index] = turn.prompt_ids + turn.completion_ids


def decode(data: bytes) -> list[Turn]:
    """The turns that `encode` was given, equal in every field.

    Raises: ValueError when `data` is no turns file, or of a later format.
    """
    try:
        table = pq.read_table(io.BytesIO(data))
    except pa.ArrowInvalid as error:
        raise ValueError(f"not a parquet file: {error}") from error
    found = (table.schema.metadata or {}).get(FORMAT)
    if found != VERSION:
        raise ValueError(f"not a turns file of format {VERSION.decode()}: {found!r}")
    turns: list[Turn] = []
    known: dict[int | None, tuple[int, ...]] = {}
    for row in table.to_pylist():
        turn = _turn(row, known.get(row["parent"], ()))
        turns.append(turn)
        known[turn.index] = turn.prompt_ids + turn.completion_ids
    return turns


def _row(turn: Turn, kept: int) -> dict[str, Any]:
    row = {name: getattr(turn, name) for name in SCHEMA.names if name != "prompt_kept"}
    row.update(
        prompt_kept=kept,
        versions=[vars(span) for span in turn.versions],
        engines=[vars(span) for span in turn.engines],
        finish_reason=turn.finish_reason.value,
        purpose=turn.purpose.value,
    )
    return row


def _turn(row: dict[str, Any], held: tuple[int, ...]) -> Turn:
    kept = row.pop("prompt_kept")
    row.update(
        prompt_ids=held[:kept] + tuple(row["prompt_ids"]),
        completion_ids=tuple(row["completion_ids"]),
        logprobs=tuple(row["logprobs"]),
        versions=tuple(VersionSpan(**span) for span in row["versions"]),
        engines=tuple(EngineSpan(**span) for span in row.get("engines") or ()),
        finish_reason=FinishReason(row["finish_reason"]),
        purpose=Purpose(row["purpose"]),
    )
    return Turn(**row)
