"""Rebuilds the messages of recorded turns, for people and text rules; never for training."""

import json
from collections.abc import Iterable
from typing import Any

from perdure.types import Turn

Message = dict[str, Any]
"""In OpenAI's form."""


def conversations(turns: Iterable[Turn]) -> dict[int, list[Message]]:
    """Turn index -> all messages of its prompt. `turns`: parents come before their children."""
    found: dict[int, list[Message]] = {}
    known: dict[int, Turn] = {}
    for turn in turns:
        added = json.loads(turn.new_messages) if turn.new_messages else []
        parent = known.get(turn.parent) if turn.parent is not None else None
        before = [] if parent is None else [*found[parent.index], answer_of(parent)]
        known[turn.index], found[turn.index] = turn, [*before, *added]
    return found


def answer_of(turn: Turn) -> Message:
    """The assistant message that the agent received."""
    said: Message = json.loads(turn.answer) if turn.answer else {"content": ""}
    return {**said, "role": "assistant"}
