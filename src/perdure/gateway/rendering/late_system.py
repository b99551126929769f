"""A system message that does not come first, for models whose format does not allow one.

Owns the one rule: it becomes a user message at the same position. Clients send such notes between turns
and keep them after a compaction; moving or dropping one would show the model another history.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Message = dict[str, Any]
T = TypeVar("T")


def as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def rendered(messages: list[Message], render: Callable[[list[Message]], T]) -> T:
    """The result of `render`. If it refuses the messages, late system messages become user messages.

    Raises: what `render` raises, if that does not help.
    """
    try:
        return render(messages)
    except Exception:
        told = [*messages[:1], *map(as_user, messages[1:])]
        if told == messages:
            raise
        return render(told)
