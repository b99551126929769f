"""Messages read before: agents send their whole history each time, and only its end is new.

Owns recognising a message that was translated already. Comparing costs a twentieth of reading; the
translation is shared by all who ask and must not be changed.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
KEPT_MESSAGES = 16_384
KEPT_CHARS = 32 << 20
"""Text of the messages kept, roughly; the ones not met for longest go first."""
END = 48
"""Characters at the end of a text by which a message is looked up."""


class Seen:
    """Example:
    seen.translated(wire, lambda: translate(wire))      # the second time: not called
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Any, tuple[Message, list[Message], int]] = OrderedDict()
        self._chars = 0

    def translated(self, wire: Message, translate: Callable[[], list[Message]]) -> list[Message]:
        """What `translate` makes of a message; it may raise, and then nothing is kept."""
        mark = _mark(wire)
        known = self._known.get(mark)
        if known is not None and known[0] == wire:
            self._known.move_to_end(mark)
            return known[1]
        found = translate()
        if mark is not None:
            self._keep(mark, wire, found)
        return found

    def _keep(self, mark: Any, wire: Message, found: list[Message]) -> None:
        chars = sum(len(message["content"]) for message in found)
        self._chars += chars - self._known.get(mark, (wire, found, 0))[2]
        self._known[mark] = (wire, found, chars)
        self._known.move_to_end(mark)
        while self._chars > KEPT_CHARS or len(self._known) > KEPT_MESSAGES:
            self._chars -= self._known.popitem(last=False)[1][2]


def _mark(wire: Message) -> Any:
    """What few messages share: the id of a call, or the end of a text. None: not worth keeping."""
    role, content = wire.get("role"), wire.get("content")
    if not isinstance(role, str):
        return None
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        block = content[-1]
        name = block.get("tool_use_id") or block.get("id")
        if isinstance(name, str):
            return role, "cache_control" in block, name
        content = block.get("text")
    if not isinstance(content, str):
        return None
    return role, len(content), content[-END:]
