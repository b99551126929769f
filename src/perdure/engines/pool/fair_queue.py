"""A queue of calls that wait for an engine. Its lines take turns, so that a large run cannot starve a
small one.

The pool chooses the lines. Only the first call of each line is tried.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import NamedTuple


class _Waiting(NamedTuple):
    attempt: Callable[[], bool]
    owner: str


class FairQueue:
    """Lines of waiting calls, which take turns. Lines that were opened with `first` go before the others."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._waiting: dict[asyncio.Future[None], _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, line: Hashable) -> bool:
        return line in self._lines

    async def wait(
        self, line: Hashable, attempt: Callable[[], bool], *, owner: str = "", first: bool = False
    ) -> None:
        """Wait until `attempt` succeeds, which is tried at this call's turn.

        The call queues directly behind the last call of the same owner in this line, if there is one.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns = self._lines.setdefault(line, deque())
        turns.insert(self._behind(turns, owner), turn)
        if first:
            self._lines.move_to_end(line, last=False)
        self._waiting[turn] = _Waiting(attempt, owner)
        try:
            await turn
        finally:
            self._leave(line, turn)

    def _behind(self, turns: "deque[asyncio.Future[None]]", owner: str) -> int:
        beside = (at for at, turn in enumerate(turns, 1) if self._waiting[turn].owner == owner)
        return max(beside, default=len(turns)) if owner else len(turns)

    def _leave(self, line: Hashable, turn: "asyncio.Future[None]") -> None:
        self._waiting.pop(turn, None)
        turns = self._lines.get(line, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._lines.pop(line, None)

    def serve(self) -> None:
        """Admit the calls that now find room, one per line in turn."""
        served = True
        while served:
            served = False
            for line in list(self._lines):
                served = self._serve_one(line) or served

    def _serve_one(self, line: Hashable) -> bool:
        turns = self._lines[line]
        while turns and turns[0].done():  # it was cancelled
            turns.popleft()
        if not turns:
            self._lines.pop(line)
            return False
        if not self._waiting[turns[0]].attempt():
            return False
        turns.popleft().set_result(None)
        self._lines.move_to_end(line)  # next time, the other lines go first
        return True
