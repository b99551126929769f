"""Calls that wait for an engine, in lines that take turns: a large run does not starve a small one.

Who waits for what is the pool's: of a line, only the first is asked whether it finds room.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable


class FairQueue:
    """The lines take turns; those of `first` are asked before all others."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._tries: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def __len__(self) -> int:
        return len(self._tries)

    def __contains__(self, line: Hashable) -> bool:
        return line in self._lines

    async def wait(
        self, line: Hashable, attempt: Callable[[], bool], *, first: bool = False
    ) -> None:
        """Return when `attempt` succeeded, asked at this call's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(line, deque()).append(turn)
        if first:
            self._lines.move_to_end(line, last=False)
        self._tries[turn] = attempt
        try:
            await turn
        finally:
            self._leave(line, turn)

    def _leave(self, line: Hashable, turn: "asyncio.Future[None]") -> None:
        self._tries.pop(turn, None)
        turns = self._lines.get(line, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._lines.pop(line, None)

    def serve(self) -> None:
        """Let in whoever finds room now, one of each line after the other."""
        served = True
        while served:
            served = False
            for line in list(self._lines):
                served = self._serve_one(line) or served

    def _serve_one(self, line: Hashable) -> bool:
        turns = self._lines[line]
        while turns and turns[0].done():  # given up meanwhile
            turns.popleft()
        if not turns:
            self._lines.pop(line)
            return False
        if not self._tries[turns[0]]():
            return False
        turns.popleft().set_result(None)
        self._lines.move_to_end(line)  # the others come first next time
        return True
