"""A system message that does not come first, for models whose format has no place for one.

Owns the one rule: it is said as user text, in its place. Clients send such notes between turns and
keep them behind a compaction; moving or dropping one would show the model another history.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Message = dict[str, Any]
T = TypeVar("T")


def as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def rendered(messages: list[Message], render: Callable[[list[Message]], T]) -> T:
    """What `render` makes of the messages as they are, or, when it refuses a late system message, with
    that one said as user.

    Raises: what `render` raises when that is not why.
    """
    try:
        return render(messages)
    except Exception:
        told = [*messages[:1], *map(as_user, messages[1:])]
        if told == messages:
            raise
        return render(told)
