"""Mints ids of tool calls. An id carries a mark of its rollout, so that a gateway recognizes an id that it
gave out even if the turn of that call is lost.
"""

import hashlib
import hmac
import re

HALF = 12
"""Hex digits of the unique part, and of the mark."""
FORM = re.compile(rf"call_([0-9a-f]{{{HALF}}})([0-9a-f]{{{HALF}}})")


class CallIds:
    """Makes ids with `key`, without which an agent cannot forge one."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def mint(self, rollout: str, turn_id: str, position: int) -> str:
        """An id that is unique across sessions and processes, because `turn_id` is."""
        unique = hashlib.sha256(f"{turn_id}/{position}".encode()).hexdigest()[:HALF]
        return f"call_{unique}{self._mark(rollout, unique)}"

    def is_minted(self, rollout: str, call_id: str) -> bool:
        """Whether a session of this rollout gave out this id."""
        found = FORM.fullmatch(call_id)
        return found is not None and hmac.compare_digest(found[2], self._mark(rollout, found[1]))

    def _mark(self, rollout: str, unique: str) -> str:
        text = f"tool call {rollout} {unique}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:HALF]
