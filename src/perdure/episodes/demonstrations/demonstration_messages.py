"""Builds a rollout's conversations from its recorded turns: each turn's new messages and its
answer.

Messages have the gateway's form (`perdure.dialects.base.ModelRequest`) for every agent and every
engine. This reads no files that an agent wrote.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.types import Turn

Message = dict[str, Any]
ABOUT_AN_ANSWER = ("placeholder", "parent_echo_changes")
"""Fields of an answer that `turns.parquet` adds and no model wrote."""


@dataclass(frozen=True)
class Conversation:
    """A line of turns from one without a parent to one that no turn continues.

    `first`: position of its first turn that no earlier conversation contains, if the rollout
    branched.
    """

    turns: tuple[Turn, ...]
    first: int = 0

    @property
    def chain(self) -> str:
        return self.turns[-1].chain

    def messages(self) -> list[Message]:
        """The messages for an SFT trainer. Only the answers of its own turns are trained; other
        assistant messages have `weight` 0, as in OpenAI's format."""
        return [
            message
            for place, turn in enumerate(self.turns)
            for message in (*asked(turn), _weighted(answered(turn), place >= self.first))
        ]

    def tools(self) -> list[dict[str, Any]]:
        """The tools that its last turn was offered, as schemas in OpenAI's form."""
        offered = next((turn.tools for turn in reversed(self.turns) if turn.tools), "[]")
        found: list[dict[str, Any]] = json.loads(offered)
        return found


def conversations(turns: Sequence[Turn]) -> list[Conversation]:
    """All conversations of a rollout, in the order of their last turns. Each answer that the agent
    used is trained once."""
    known = {turn.index: turn for turn in turns}
    kept = [t for t in turns if t.purpose.is_of_trajectory and not t.unused]
    continued = {turn.parent for turn in kept}
    taken: set[int] = set()
    found = []
    for last in kept:
        if last.index not in continued:
            line = tuple(_line(known, last))[::-1]
            shared = sum(turn.index in taken for turn in line)
            found.append(Conversation(line, shared))
            taken.update(turn.index for turn in line)
    return found


def _line(known: dict[int, Turn], last: Turn) -> Iterator[Turn]:
    turn: Turn | None = last
    while turn is not None:
        yield turn
        turn = None if turn.parent is None else known.get(turn.parent)


def has_text(turns: Sequence[Turn]) -> bool:
    """Whether the texts of the turns were recorded."""
    return all(turn.new_messages and turn.answer for turn in turns)


def asked(turn: Turn) -> list[Message]:
    """The messages that a turn adds to its parent turn."""
    found: list[Message] = json.loads(turn.new_messages)
    return [_weighted(one, False) if one["role"] == "assistant" else one for one in found]


def answered(turn: Turn) -> Message:
    """The assistant's message, as sampled."""
    message: Message = json.loads(turn.answer)
    if message.get("placeholder"):
        message["content"] = ""
    return {name: value for name, value in message.items() if name not in ABOUT_AN_ANSWER}


def _weighted(message: Message, trained: bool) -> Message:
    return message if trained else {**message, "weight": 0}
