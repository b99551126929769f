"""Encodes turns as parquet: arrays of token ids, logprobs and versions, exactly as captured.

Owns the format of the file that the gateway writes when a session closes, and that episodes are
built from.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from perdure.types import Turn

FORMAT = b"perdure.turns"
VERSION = b"2"
GROUP_IDS = 1 << 18
"""Ids per row group. Eight bytes of experts count as one id."""
LEADING = (
    *("index", "chain", "parent_chain", "parent", "purpose", "replayed_from"),
    *("new_messages", "answer", "prompt_kept", "prompt_ids", "completion_ids", "logprobs"),
)
"""The first columns of the file. The others follow in the order of their definition in `TurnFacts`,
so a new field becomes the last column."""
IDS = ("prompt_ids", "completion_ids", "response_ids")
"""Columns with many equal values; only these get a parquet dictionary."""
WIDE = ("version", "generation", "seed")
"""Integers of 64 bits; all others take 32."""
SCALARS: dict[type, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int32(),
    float: pa.float64(),
    bytes: pa.binary(),
}


def parquet_writer_options(schema: pa.Schema) -> dict[str, Any]:
    """Options of a parquet writer. Dictionaries and statistics of all columns would be most of a
    small file, and most of the time to write it."""
    ids = [f"{name}.list.element" for name in IDS if name in schema.names]
    return {"compression": "zstd", "use_dictionary": ids, "write_statistics": False}


def _arrow_type(name: str, annotation: Any) -> pa.DataType:
    """The column type of a field. Raises: TypeError for a field that has none."""
    if get_origin(annotation) is UnionType:
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    if get_origin(annotation) is tuple:
        return pa.list_(_arrow_type(name, get_args(annotation)[0]))
    if issubclass(annotation, BaseModel):
        return pa.struct(columns_of(annotation))
    if issubclass(annotation, StrEnum):
        return pa.string()
    return pa.int64() if name in WIDE else SCALARS[annotation]


def columns_of(model: type[BaseModel]) -> list[tuple[str, pa.DataType]]:
    """Name and type of the column for each field."""
    fields = model.model_fields.items()
    return [(name, _arrow_type(name, field.annotation)) for name, field in fields]


def schema_of(model: type[Turn]) -> pa.Schema:
    """The columns of a turn, derived from its fields."""
    # A prompt starts with `prompt_kept` ids of its parent turn (its prompt, then its completion).
    columns = {"prompt_kept": pa.int32()} | dict(columns_of(model))
    names = [*LEADING, *(name for name in columns if name not in LEADING)]
    return pa.schema([(name, columns[name]) for name in names], metadata={FORMAT: VERSION})


SCHEMA = schema_of(Turn)


class Delta(NamedTuple):
    """A turn in the form of the file: `prompt_ids` follow the first `kept` ids of its parent turn
    (its prompt, then its completion)."""

    turn: Turn
    kept: int


def encode(turns: Sequence[Turn]) -> bytes:
    """One row per turn, with only the ids that its prompt adds, so the file grows linearly."""
    return encode_deltas(_deltas(turns))


def encode_deltas(deltas: Iterable[Delta]) -> bytes:
    """As `encode`, for a writer without whole prompts. One row group is in memory at a time."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, SCHEMA, **parquet_writer_options(SCHEMA)) as writer:
        rows: list[dict[str, Any]] = []
        pending = 0
        for turn, kept in deltas:
            rows.append(_row(turn, kept))
            pending += len(turn.prompt_ids) + len(turn.completion_ids)
            pending += len(turn.routed_experts.data) // 8 if turn.routed_experts else 0
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
    """The turns that `encode` wrote, equal in every field.

    Raises: ValueError when `data` is not a turns file of this format.
    """
    turns: list[Turn] = []
    known: dict[int | None, tuple[int, ...]] = {}
    for row in _table(data).to_pylist():
        turn = _turn(row, known.get(row["parent"], ()))
        turns.append(turn)
        known[turn.index] = turn.prompt_ids + turn.completion_ids
    return turns


@dataclass(frozen=True)
class TurnTexts:
    index: int
    purpose: str
    new_messages: str
    answer: str


def decode_texts(data: bytes) -> list[TurnTexts]:
    """The texts alone, without reading the ids. Raises: ValueError as `decode`."""
    return [
        TurnTexts(**row)
        for row in _table(data, [field.name for field in fields(TurnTexts)]).to_pylist()
    ]


def _table(data: bytes, columns: list[str] | None = None) -> pa.Table:
    try:
        # `read_table` would first make a dataset of the file.
        table = pq.ParquetFile(pa.BufferReader(data)).read(columns, use_threads=False)
    except pa.ArrowInvalid as error:
        raise ValueError(f"not a parquet file: {error}") from error
    found = (table.schema.metadata or {}).get(FORMAT)
    if found != VERSION:
        raise ValueError(f"not a turns file of format {VERSION.decode()}: {found!r}")
    return table


def _row(turn: Turn, kept: int) -> dict[str, Any]:
    return {name: _plain(value) for name, value in turn} | {"prompt_kept": kept}


def _plain(value: Any) -> Any:
    """Convert spans and sampling to dicts; keep token ids and logprobs unchanged."""
    if isinstance(value, BaseModel):
        return vars(value)
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return [vars(one) for one in value]
    return value


def _turn(row: dict[str, Any], held: tuple[int, ...]) -> Turn:
    kept = row.pop("prompt_kept")
    return Turn.model_validate(row | {"prompt_ids": (*held[:kept], *row["prompt_ids"])})
