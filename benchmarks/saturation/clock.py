"""An event loop whose time jumps to the next timer: minutes of agents pass in a second."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Leap(selectors.DefaultSelector):
    """A selector that does not wait: it advances the virtual clock by the time to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(timeout or 0.0, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        return self._leap.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, with a clock that starts at 0 and never waits."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
