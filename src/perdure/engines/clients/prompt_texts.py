"""Prompts as JSON: a turn's prompt repeats the one before it, so only its end is written anew.

Owns the texts that are kept, and the proof, id for id, that a prompt begins with a kept one.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import orjson

KEPT_BYTES = 64 << 20
"""Bytes of texts and ids kept; those of sessions that asked longest ago go first."""
SHORT = 8192
"""A prompt of fewer ids is written faster than it is compared."""
MOST_PARTS = 64


class Written(NamedTuple):
    """A prompt's ids, as the bytes of its array, and its text without brackets, in parts."""

    ids: bytes
    parts: tuple[bytes, ...]

    @property
    def weight(self) -> int:
        return len(self.ids) + sum(map(len, self.parts))


class PromptTexts:
    """Example:
    b"".join(texts.of("s", [5, 6]))               # b"[5,6]"
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._known: OrderedDict[str, Written] = OrderedDict()
        """The newest prompt of each session."""
        self._weight = 0

    def of(self, session_id: str, ids: Sequence[int]) -> tuple[bytes, ...]:
        """The JSON text of the ids, in parts."""
        now = (ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)).tobytes()
        if len(ids) < SHORT:
            return (_text(now),)
        known = self._known.pop(session_id, None)
        parts: tuple[bytes, ...] = ()
        start = 0
        if known is not None:
            self._weight -= known.weight
            if now.startswith(known.ids):
                parts, start = known.parts, len(known.ids)
        if start < len(now):
            parts = (*parts, b"," if parts else b"", _text(now[start:])[1:-1])
        if len(parts) > MOST_PARTS:
            parts = (b"".join(parts),)
        self._keep(session_id, Written(now, parts))
        return (b"[", *parts, b"]")

    def _keep(self, session_id: str, written: Written) -> None:
        self._known[session_id] = written
        self._weight += written.weight
        while self._weight > self._kept_bytes:
            self._weight -= self._known.popitem(last=False)[1].weight


def _text(ids: bytes) -> bytes:
    """Straight from memory: 0.7 ms for 128k ids, where `json` takes 13 ms."""
    import numpy  # programs that never ask for tokens do without (7 MB)

    return orjson.dumps(numpy.frombuffer(ids, numpy.intc), option=orjson.OPT_SERIALIZE_NUMPY)


TEXTS = PromptTexts()
"""Those of this process."""
