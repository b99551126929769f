"""Tracks what the calls of each session wait for now."""

import contextlib
from collections.abc import Iterator

from perdure.engines.base import Wait


class Waits:
    """The waiting calls of each session."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Wait]] = {}

    def longest(self, session_id: str) -> Wait | None:
        """The wait of the session's call that has waited longest; None if none of its calls waits."""
        return min(self._waiting.get(session_id, ()), key=lambda wait: wait.since, default=None)

    @contextlib.contextmanager
    def noted(self, session_id: str, wait: Wait) -> Iterator[None]:
        """Record that a call waits while the block runs."""
        waiting = self._waiting.setdefault(session_id, [])
        waiting.append(wait)
        try:
            yield
        finally:
            waiting.remove(wait)
            if not waiting:
                self._waiting.pop(session_id, None)
