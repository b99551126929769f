"""A prompt's token ids together with their JSON text, of which only the new end is ever written.

Writing 128k integers costs more than everything else a gateway does in a turn.
"""

import json
from array import array
from collections.abc import Iterable


class PromptIds(array):  # type: ignore[type-arg]  # cannot be subscripted at run time
    """An `array("i")` that knows its JSON text without the brackets.

    Example:
        PromptIds("i", [1, 2]).text                         # b"1,2"
    """

    _text: bytes | None = None

    @classmethod
    def of(cls, ids: Iterable[int], text: bytes | None = None) -> "PromptIds":
        made = cls("i", ids)
        made._text = text
        return made

    @property
    def text(self) -> bytes:
        if self._text is None:
            self._text = ids_text(self)
        return self._text


def ids_text(ids: "array[int]") -> bytes:
    """`1,2,3`: ids as JSON, without the brackets."""
    return json.dumps(ids.tolist(), separators=(",", ":"))[1:-1].encode()
