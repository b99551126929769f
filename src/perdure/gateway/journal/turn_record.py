"""A turn as the journal keeps it: what it adds to an earlier turn, so that a journal grows with
the text and not with its square. Owns the record's form and the turns read out of a journal.
"""

import base64
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perdure.dialects.base import Answer
from perdure.gateway.canonical import Message
from perdure.types import EngineSpan, FinishReason, Purpose, Turn, VersionSpan

TURN, OPEN, SEALED, CLOSED, STALE = "turn", "open", "sealed", "closed", "stale"
PLACEHOLDER = "(no visible output)"
"""What an agent reads of a turn that sampled neither text nor a tool call."""


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One committed turn.

    `base` is the turn this one is stored against: `kept_messages` leading messages of its request
    and `kept_ids` leading ids of its prompt + completion are not repeated here; `messages` and
    `prompt` hold the rest. `parent` is the turn whose prompt + completion the prompt extends,
    `echo_of` the one whose answer the request's newest assistant message sends back.
    """

    index: int
    turn_id: str
    chain: str
    parent_chain: str
    purpose: Purpose
    parent: int | None
    base: int | None
    echo_of: int | None
    echo_changes: tuple[str, ...]
    replayed_from: str
    started_at: float
    request_sha256: str
    across_sha256: str
    tools_sha256: str
    kept_messages: int
    messages: list[Message]
    kept_ids: int
    prompt: "array[int]"
    completion: "array[int]"
    logprobs: "array[float]"
    versions: tuple[VersionSpan, ...]
    engines: tuple[EngineSpan, ...]
    finish_reason: FinishReason
    engine: str
    miss: str | None
    trainable: bool
    engine_seconds: float
    seconds: float
    reasoning_open: bool
    placeholder: bool
    """The answer's text stands in for an empty one; the recorded ids are as sampled."""
    answer: Answer


def to_journal(record: TurnRecord) -> dict[str, Any]:
    fields = dict(vars(record))
    fields.update(
        kind=TURN,
        prompt=pack(record.prompt),
        completion=pack(record.completion),
        logprobs=pack(record.logprobs),
        versions=[[span.version, span.start, span.end] for span in record.versions],
        engines=[span.model_dump() for span in record.engines],
        answer=asdict(record.answer),
    )
    return fields


def from_journal(fields: dict[str, Any]) -> TurnRecord:
    fields = {"engines": (), **fields}  # journals of before engines were pooled
    known = {name: fields[name] for name in TurnRecord.__dataclass_fields__}
    known.update(
        purpose=Purpose(fields["purpose"]),
        echo_changes=tuple(fields["echo_changes"]),
        prompt=unpack("i", fields["prompt"]),
        completion=unpack("i", fields["completion"]),
        logprobs=unpack("d", fields["logprobs"]),
        versions=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in fields["versions"]),
        engines=tuple(EngineSpan(**span) for span in fields["engines"]),
        finish_reason=FinishReason(fields["finish_reason"]),
        answer=Answer(**fields["answer"]),
    )
    return TurnRecord(**known)


def pack(values: "array[Any]") -> str:
    """Little-endian int32 or float64, as base64."""
    return base64.b64encode(_little_endian(values)).decode("ascii")


def unpack(code: str, text: str) -> "array[Any]":
    values = array(code)
    values.frombytes(base64.b64decode(text))
    return _little_endian(values)


def _little_endian(values: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values


def turn_records(records: Sequence[dict[str, Any]]) -> list[TurnRecord]:
    """The turns of a journal, as they were committed."""
    return [from_journal(record) for record in records if record["kind"] == TURN]


def turns_of(records: Sequence[TurnRecord]) -> list[Turn]:
    """The turns of a session with their whole prompts."""
    return [_turn(records, record, prompt_of(records, record)) for record in records]


def turn_deltas(records: Sequence[TurnRecord]) -> Iterator[tuple[Turn, int]]:
    """The turns of a session, one whole prompt in memory at most: each with only the prompt ids behind
    the first n ids of its parent (its prompt, then its completion), and that n."""
    for record in records:
        kept, added = _behind_parent(records, record)
        yield _turn(records, record, added), kept


def _behind_parent(records: Sequence[TurnRecord], record: TurnRecord) -> tuple[int, "array[int]"]:
    if record.parent is not None and record.parent == record.base:
        return record.kept_ids, record.prompt
    prompt = prompt_of(records, record)
    if record.parent is None:
        return 0, prompt
    parent = records[record.parent]
    held = prompt_of(records, parent) + parent.completion
    return (len(held), prompt[len(held) :]) if prompt[: len(held)] == held else (0, prompt)


def prompt_of(records: Sequence[TurnRecord], record: TurnRecord) -> "array[int]":
    """A record's whole prompt. Shape [P]."""
    parts = [record.prompt]
    need, base = record.kept_ids, record.base
    while base is not None and need > 0:
        held = records[base]
        parts.append((held.prompt + held.completion)[: max(0, need - held.kept_ids)])
        need, base = min(need, held.kept_ids), held.base
    prompt = array("i")
    for part in reversed(parts):
        prompt.extend(part)
    return prompt


def _messages_from(records: Sequence[TurnRecord], record: TurnRecord, start: int) -> list[Message]:
    """A record's request messages from number `start` on."""
    parts: list[list[Message]] = []
    need, at = _length(record), record
    while need > start:
        first = at.kept_messages
        parts.append(at.messages[max(0, start - first) : max(0, need - first)])
        need = min(need, first)
        if at.base is None:
            break
        at = records[at.base]
    return [message for part in reversed(parts) for message in part]


def _length(record: TurnRecord) -> int:
    return record.kept_messages + len(record.messages)


def _turn(records: Sequence[TurnRecord], record: TurnRecord, prompt: "array[int]") -> Turn:
    # The parent's request and its answer were seen already.
    seen = 0 if record.parent is None else _length(records[record.parent]) + 1
    new_messages = _messages_from(records, record, seen)
    return Turn(
        index=record.index,
        chain=record.chain,
        parent_chain=record.parent_chain,
        parent=record.parent,
        purpose=record.purpose,
        replayed_from=record.replayed_from,
        new_messages=json.dumps(new_messages),
        answer=json.dumps(_given(record)),
        prompt_ids=tuple(prompt),
        completion_ids=tuple(record.completion),
        logprobs=tuple(record.logprobs),
        versions=record.versions,
        engines=record.engines,
        finish_reason=record.finish_reason,
        engine=record.engine,
        bridged=record.parent is not None and bool(record.completion),
        bridge_miss=record.miss,
        trainable=record.trainable,
        started_at=record.started_at,
        engine_seconds=record.engine_seconds,
        seconds=record.seconds,
        request_sha256=record.request_sha256,
    )


def _given(record: TurnRecord) -> Message:
    """The answer's message, with what the record knows about it and the agent does not."""
    said = {**record.answer.message}
    if record.placeholder:
        said["placeholder"] = True
    if record.echo_changes:
        said["parent_echo_changes"] = list(record.echo_changes)
    return said
