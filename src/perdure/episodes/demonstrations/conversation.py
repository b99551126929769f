"""A rollout's conversations, from its recorded turns: the messages that each turn was asked, and its answers.

Messages are of the gateway's form (`perdure.dialects.base.ModelRequest`), for every agent and every
engine. What an agent wrote about itself is not read.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.types import Purpose, Turn

Message = dict[str, Any]
ABOUT_AN_ANSWER = ("placeholder", "parent_echo_changes")
"""What `turns.parquet` says about an answer, and no model said."""


@dataclass(frozen=True)
class Conversation:
    """An unbroken line of turns, from one that starts anew to one that no turn continues.

    `first`: the first of its turns that no earlier conversation has, where a rollout branched.
    """

    turns: tuple[Turn, ...]
    first: int = 0

    @property
    def chain(self) -> str:
        return self.turns[-1].chain

    def messages(self) -> list[Message]:
        """What an SFT trainer reads. Of the assistant's messages only the answers of its own turns are
        trained; the others have `weight` 0, as in OpenAI's format."""
        return [
            message
            for place, turn in enumerate(self.turns)
            for message in (*asked(turn), _weighted(answered(turn), place >= self.first))
        ]

    def tools(self) -> list[dict[str, Any]]:
        """What its last turn was offered, as schemas in OpenAI's form."""
        offered = next((turn.tools for turn in reversed(self.turns) if turn.tools), "[]")
        found: list[dict[str, Any]] = json.loads(offered)
        return found


def conversations(turns: Sequence[Turn]) -> list[Conversation]:
    """All conversations of a rollout, in the order of their last turns. Each answer is trained once, and
    none that the agent went on without."""
    known = {turn.index: turn for turn in turns}
    kept = [t for t in turns if t.purpose is not Purpose.SIDE and not t.unused]
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
    """The assistant's message as it was sampled."""
    message: Message = json.loads(turn.answer)
    if message.get("placeholder"):
        message["content"] = ""
    return {name: value for name, value in message.items() if name not in ABOUT_AN_ANSWER}


def _weighted(message: Message, trained: bool) -> Message:
    return message if trained else {**message, "weight": 0}
