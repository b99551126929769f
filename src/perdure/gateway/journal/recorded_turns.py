"""Rebuilds a session's turns from its records: whole prompts, and whether the agent used each answer.

Only later requests show whether an answer was used. So this is decided when a session is read, not when
a turn is committed.
"""

from collections.abc import Iterator, Sequence, Set

from perdure.gateway.journal.turn_record import TurnRecord, messages_from, turn_delta, turn_of
from perdure.gateway.turns.canonical_request import Message, visible
from perdure.types import Purpose, Turn

QUOTED_CHARS = 24
"""A shorter text may occur in other texts by chance, so it counts as quoted only if it is a whole line."""


def turns_of(records: Sequence[TurnRecord]) -> list[Turn]:
    """The turns of a session with their whole prompts."""
    left = _unused(records)
    return [turn_of(records, one, unused=one.index in left) for one in records]


def turn_deltas(records: Sequence[TurnRecord]) -> Iterator[tuple[Turn, int]]:
    """The turns of a session, with at most one whole prompt in memory. Each comes with a number n, and
    the prompt ids that follow the first n ids of its parent (its prompt, then its completion)."""
    left = _unused(records)
    for one in records:
        yield turn_delta(records, one, unused=one.index in left)


def _unused(records: Sequence[TurnRecord]) -> set[int]:
    """Indexes of the turns whose answer no later request of the session quotes or sends back, whole or
    edited. The last request of a chain counts as used, because no later request shows what the agent did
    with its answer."""
    used = {record.echo_of for record in records} | set(_edited(records))
    last = {record.chain: record.request_sha256 for record in records}
    return {
        record.index
        for record in records
        if record.index not in used
        and record.purpose is Purpose.STEP
        and last[record.chain] != record.request_sha256
        and not _sent_back(records[record.index + 1 :], record.answer.message)
    }


def _sent_back(later: Sequence[TurnRecord], answer: Message) -> bool:
    """Whether a later request has the answer anywhere in its history, or quotes its text, as it does
    after a harness has written its own summary."""
    calls = {call["id"] for call in answer.get("tool_calls") or ()}
    text = visible(answer.get("content") or "")
    return any(_has(message, calls, text) for record in later for message in record.messages)


def _has(message: Message, calls: Set[str], text: str) -> bool:
    its = {call["id"] for call in message.get("tool_calls") or ()}
    if calls & its:
        return True
    said = visible(message["content"])
    if len(text) >= QUOTED_CHARS and text in said:
        return True
    if message["role"] == "assistant":
        return said == text and not calls and not its
    return bool(text) and text in map(visible, message["content"].splitlines())


def _edited(records: Sequence[TurnRecord]) -> Iterator[int]:
    """Turns whose answer a later request sends back edited: the histories are equal up to that answer."""
    for record in records:
        if record.bridge_miss != "echo_edited" or record.echo_of is not None:
            continue
        messages = messages_from(records, record, 0)
        roles = [message["role"] for message in messages]
        at = len(roles) - 1 - roles[::-1].index("assistant")
        yield from (
            earlier.index
            for earlier in records[: record.index]
            if earlier.chain == record.chain and earlier.length == at
        )
