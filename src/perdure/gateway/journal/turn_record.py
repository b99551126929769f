"""A turn as a journal record: what it adds to an earlier turn.

So a journal grows linearly with the conversation, not quadratically. Owns the record's form, and
rebuilds whole turns from records.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, SkipValidation

from perdure.dialects.base import Answer
from perdure.gateway.journal.record_encoding import pack, unpack
from perdure.gateway.turns.canonical_request import Message
from perdure.types import Turn, TurnFacts, Usage

OPEN, SEALED, CLOSED = "open", "sealed", "closed"
STALE, UNANSWERED, REFUSED, DAMAGED = "stale", "unanswered", "refused", "damaged"
CAPPED, STOPPED, RETOKENIZED = "capped", "stopped", "retokenized"
TURN: Literal["turn"] = "turn"
UNVALIDATED_FIELDS = {"messages", "answer", "tools"}
"""Fields that clients and models wrote. They may hold lone surrogates, which pydantic refuses."""


def _ids(value: Any) -> Any:
    return unpack("i", value) if isinstance(value, str) else value


def _floats(value: Any) -> Any:
    return unpack("d", value) if isinstance(value, str) else value


def _answer(value: Any) -> Any:
    return Answer(**value) if isinstance(value, dict) else value


if TYPE_CHECKING:
    Ids: TypeAlias = array[int]
    Floats: TypeAlias = array[float]
else:  # Python 3.11 does not accept `array[int]` at run time
    Ids = Annotated[array, BeforeValidator(_ids), PlainSerializer(pack, when_used="json")]
    Floats = Annotated[array, BeforeValidator(_floats), PlainSerializer(pack, when_used="json")]


class TurnRecord(TurnFacts):
    """One committed turn.

    `base` is the turn that this one is stored against. `kept_messages` leading messages of its request
    and `kept_ids` leading ids of its prompt + completion are not repeated here; `messages` and
    `prompt` hold the rest. `parent` is the turn whose prompt + completion the prompt extends.
    `echo_of` is the turn whose answer the request's newest assistant message sends back.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    kind: Literal["turn"] = TURN
    turn_id: str
    base: int | None
    echo_of: int | None
    echo_changes: tuple[str, ...]
    mark: str = ""
    """What the agent's harness sent in `AGENT_HEADER`."""
    across_sha256: str
    tools_sha256: str
    tools: SkipValidation[list[dict[str, Any]] | None] = None
    """The list with this digest, stored only in the session's first turn that uses it."""
    kept_messages: int
    messages: SkipValidation[list[Message]]
    kept_ids: int
    prompt: Ids
    completion: Ids
    logprobs: Floats
    answer: Annotated[SkipValidation[Answer], BeforeValidator(_answer)]
    reasoning_open: bool
    """Whether the completion ended inside its reasoning."""
    placeholder: bool
    """Whether the answer's text replaces an empty one. The recorded ids are as sampled."""

    @property
    def length(self) -> int:
        """Number of messages in its whole request."""
        return self.kept_messages + len(self.messages)

    @property
    def prompt_length(self) -> int:
        """Number of ids in its whole prompt."""
        return self.kept_ids + len(self.prompt)


def usage_of(record: TurnRecord) -> Usage:
    """The turn's token counts: the numbers of its ids, or the counts that a hosted API reported."""
    if record.completion:
        return Usage(prompt_tokens=record.prompt_length, sampled_tokens=len(record.completion))
    return _usage(record.answer.usage) or Usage()


def to_journal(record: TurnRecord) -> dict[str, Any]:
    fields = record.model_dump(mode="json", exclude=UNVALIDATED_FIELDS)
    answer = {**vars(record.answer)}
    if record.answer.stop_sequence is None:
        del answer["stop_sequence"]  # gateways of earlier versions refuse unknown fields
    tools = {"tools": record.tools} if record.tools else {}
    for name in ("waiting_seconds", "mark", "routed_experts", "kept_tokens"):
        if not fields[name]:
            del fields[name]
    if fields["preemptions"] is None:
        del fields["preemptions"]
    return fields | tools | {"messages": record.messages, "answer": answer}


def turn_records(records: Sequence[dict[str, Any]]) -> list[TurnRecord]:
    """The turns among a journal's records, in order of commitment."""
    return [TurnRecord.model_validate(record) for record in records if record["kind"] == TURN]


def turn_of(records: Sequence[TurnRecord], record: TurnRecord, *, unused: bool) -> Turn:
    """A turn with its whole prompt."""
    return _turn(records, record, prompt_of(records, record), unused=unused)


def turn_delta(
    records: Sequence[TurnRecord], record: TurnRecord, *, unused: bool
) -> tuple[Turn, int]:
    """A turn with a number n, and the prompt ids that follow the first n ids of its parent (its prompt,
    then its completion)."""
    kept, added = _behind_parent(records, record)
    return _turn(records, record, added, unused=unused), kept


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


def messages_from(records: Sequence[TurnRecord], record: TurnRecord, start: int) -> list[Message]:
    """A record's request messages from number `start` on."""
    parts: list[list[Message]] = []
    need, at = record.length, record
    while need > start:
        first = at.kept_messages
        parts.append(at.messages[max(0, start - first) : max(0, need - first)])
        need = min(need, first)
        if at.base is None:
            break
        at = records[at.base]
    return [message for part in reversed(parts) for message in part]


def _turn(
    records: Sequence[TurnRecord], record: TurnRecord, prompt: "array[int]", *, unused: bool
) -> Turn:
    # The parent turn already has its own request and answer.
    seen = 0 if record.parent is None else records[record.parent].length + 1
    return Turn(
        **{name: getattr(record, name) for name in TurnFacts.model_fields},
        new_messages=json.dumps(messages_from(records, record, seen)),
        answer=json.dumps(_given(record)),
        unused=unused,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(record.completion),
        logprobs=tuple(record.logprobs),
        usage=None if record.completion else _usage(record.answer.usage),
        tools=_tools(records, record),
    )


def _tools(records: Sequence[TurnRecord], record: TurnRecord) -> str:
    """The tool list as JSON; empty if it equals the parent turn's."""
    digest = record.tools_sha256
    if record.parent is not None and records[record.parent].tools_sha256 == digest:
        return ""
    same = (one.tools for one in records if one.tools and one.tools_sha256 == digest)
    return json.dumps(next(same, []))


def _usage(counted: Mapping[str, Any]) -> Usage | None:
    """The token counts of a hosted API, from the usage field of a chat completion."""
    details = counted.get("prompt_tokens_details")
    found = {
        "prompt_tokens": counted.get("prompt_tokens"),
        "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else None,
        "sampled_tokens": counted.get("completion_tokens"),
    }
    known = {name: count for name, count in found.items() if isinstance(count, int)}
    return Usage(**known) if known else None


def _given(record: TurnRecord) -> Message:
    """The answer's message, with facts that only the record has."""
    said = {**record.answer.message}
    if record.placeholder:
        said["placeholder"] = True
    if record.echo_changes:
        said["parent_echo_changes"] = list(record.echo_changes)
    return said
