"""Handles system messages after the first message, for models whose format does not allow them.

The rule is that such a message becomes a user message at the same position. Clients send these notes
between turns and keep them after a compaction. Moving or dropping one would change the history.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Message = dict[str, Any]
T = TypeVar("T")


def as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def rendered(messages: list[Message], render: Callable[[list[Message]], T]) -> T:
    """The result of `render`. If it refuses the messages, late system messages become user messages.

    Raises: any error of `render` that this does not cure.
    """
    try:
        return render(messages)
    except Exception:
        told = [*messages[:1], *map(as_user, messages[1:])]
        if told == messages:
            raise
        return render(told)
