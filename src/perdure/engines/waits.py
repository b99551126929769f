"""What the calls of each session wait for at this moment."""

import contextlib
from collections.abc import Iterator

from perdure.engines.base import Wait


class Waits:
    """By session: its calls that wait."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Wait]] = {}

    def longest(self, session_id: str) -> Wait | None:
        """Of the call that has waited longest; None if no call of the session waits."""
        return min(self._waiting.get(session_id, ()), key=lambda wait: wait.since, default=None)

    @contextlib.contextmanager
    def noted(self, session_id: str, wait: Wait) -> Iterator[None]:
        """A call waits inside the block."""
        waiting = self._waiting.setdefault(session_id, [])
        waiting.append(wait)
        try:
            yield
        finally:
            waiting.remove(wait)
            if not waiting:
                self._waiting.pop(session_id, None)
