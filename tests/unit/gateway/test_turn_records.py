"""A session's turns are stored as differences and read back whole."""

import hashlib
import random
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from perdure.dialects.base import Answer
from perdure.episodes.turns_parquet import (
    SCHEMA,
    VERSION,
    Delta,
    decode,
    encode,
    encode_deltas,
    schema_of,
)
from perdure.gateway.journal.record_encoding import frame, unframe
from perdure.gateway.journal.recorded_turns import turn_deltas, turns_of
from perdure.gateway.journal.turn_record import (
    TurnRecord,
    prompt_of,
    to_journal,
    turn_records,
)
from perdure.gateway.session_state import Totals
from perdure.types import Price, Turn, TurnFacts

ANSWER = Answer("a", 0, "m", {"role": "assistant", "content": "yo"}, "stop", {})


def _record(index: int, prompt: Sequence[int], completion: Sequence[int], **at: Any) -> TurnRecord:
    """`at`: parent, base, kept_ids, kept_messages, messages."""
    fields = {"parent": None, "base": None, "kept_ids": 0, "kept_messages": 0, "messages": []} | at
    return TurnRecord(
        index=index,
        turn_id=f"s-{index}",
        echo_of=None,
        echo_changes=(),
        across_sha256="",
        tools_sha256="",
        prompt=array("i", prompt),
        completion=array("i", completion),
        logprobs=array("d", [-0.5] * len(completion)),
        reasoning_open=False,
        placeholder=False,
        answer=ANSWER,
        **fields,
    )


def _tree(dice: random.Random, turns: int) -> list[TurnRecord]:
    """Roots, continued turns, and replayed ones whose parent differs from their base."""
    records: list[TurnRecord] = []
    said: list[list[dict[str, Any]]] = []
    for index in range(turns):
        base = dice.choice([None, *range(index)])
        held = 0 if base is None else len(prompt_of(records, records[base]))
        held += 0 if base is None else len(records[base].completion)
        heard = [] if base is None else said[base]
        kept = len(heard) if dice.random() < 0.7 else dice.randint(0, len(heard))
        new = [{"role": "user", "content": f"{index}.{i}"} for i in range(dice.randint(0, 3))]
        said.append([*heard[:kept], *new])
        records.append(
            _record(
                index,
                dice.choices(range(9), k=dice.randint(0, 4)),
                dice.choices(range(9), k=dice.randint(0, 2)),
                base=base,
                parent=dice.choice([base, base, None, *range(index)]),
                kept_ids=held if dice.random() < 0.7 else dice.randint(0, held),
                kept_messages=kept,
                messages=new,
            )
        )
    return records


def test_what_is_written_turn_by_turn_reads_back_whole() -> None:
    """The file that is made from the differences has the same turns as the records."""
    for seed in range(60):
        records = _tree(random.Random(seed), turns=8)
        deltas = (Delta(*delta) for delta in turn_deltas(records))

        assert (
            decode(encode_deltas(deltas)) == turns_of(records) == decode(encode(turns_of(records)))
        )


def test_closing_a_long_session_holds_no_whole_prompts() -> None:
    """As whole prompts, 100 turns over 40,000 tokens take 30 MB; writing them takes a few."""
    records = [_record(0, range(40_000), range(50))]
    for index in range(1, 100):
        held = records[-1].kept_ids + len(records[-1].prompt) + len(records[-1].completion)
        records.append(
            _record(index, range(200), range(50), parent=index - 1, base=index - 1, kept_ids=held)
        )
    encode_deltas(Delta(*delta) for delta in turn_deltas(records[:1]))  # imports and pools
    tracemalloc.start()
    encode_deltas(Delta(*delta) for delta in turn_deltas(records))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 16 << 20


def _other_than_default(annotation: Any) -> Any:
    """A value that no field of this type has by default."""
    if get_origin(annotation) is UnionType:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is tuple:
        return (_other_than_default(get_args(annotation)[0]),)
    if issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return annotation(**{name: _other_than_default(field.annotation) for name, field in fields})
    if issubclass(annotation, StrEnum):
        return list(annotation)[-1]
    return {int: 3, float: 0.25, str: "said", bool: True, bytes: b"\xff\x00"}[annotation]


class _Wider(Turn):
    """A turn with two more fields."""

    cached_tokens: int = 0
    route: str = ""


def test_a_turns_field_is_defined_once_and_arrives_everywhere() -> None:
    """Every field of `TurnFacts` passes through the journal and the parquet file, and a new one
    gets the last column."""
    facts = {name: _other_than_default(f.annotation) for name, f in TurnFacts.model_fields.items()}
    facts |= {"index": 0, "parent": None, "trainable": False}
    whole = _record(0, [1, 2], [3]).model_copy(update=facts)
    line = unframe(frame(to_journal(whole)))
    assert line is not None
    (read_back,) = turn_records([line])
    (turn,) = decode(encode(turns_of([read_back])))

    assert read_back == whole
    assert {name: getattr(turn, name) for name in facts} == facts
    assert schema_of(_Wider).names[-2:] == ["cached_tokens", "route"]


def test_the_columns_of_the_turns_file_are_those_of_its_format_version() -> None:
    """Other programs read these columns, so a change of the definition must not rename or retype
    them."""
    digest = hashlib.sha256(SCHEMA.serialize().to_pybytes()).hexdigest()

    assert (VERSION, digest[:16]) == (b"2", "4e8b5e38ffefa2df")


def test_concurrent_waits_count_once() -> None:
    """Two sub-agents that wait during the same minute add one minute to their agent's waiting
    time."""
    totals = Totals()
    for started, waited in ((100.0, 60.0), (110.0, 50.0), (150.0, 30.0), (300.0, 5.0)):
        record = _record(0, [1], [2])
        at = {"started_at": started, "waiting_seconds": waited}
        totals.add(record.model_copy(update=at))

    assert totals.waiting_seconds == 80.0 + 5.0


def test_a_cap_in_dollars_counts_cached_tokens_at_their_price() -> None:
    """As the API's bill does: most of an agent's prompt is cached, at a tenth of the price."""
    usage = {"prompt_tokens": 1000, "completion_tokens": 20}
    answer = replace(ANSWER, usage={**usage, "prompt_tokens_details": {"cached_tokens": 900}})
    record = _record(0, [], []).model_copy(update={"answer": answer})
    totals = Totals()
    for _ in range(2):
        totals.add(record, Price(input=10.0, cached=1.0, output=50.0))

    assert totals.dollars == pytest.approx(2 * (100 * 10 + 900 * 1 + 20 * 50) / 1e6)
