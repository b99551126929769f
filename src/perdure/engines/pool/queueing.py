"""Calls that wait for an engine, in lines that take turns: a large run does not starve a small one.

Who waits for what is the pool's: of a line, only the first is asked whether it finds room.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import NamedTuple


class _Waiting(NamedTuple):
    attempt: Callable[[], bool]
    owner: str


class FairQueue:
    """The lines take turns; those of `first` are asked before all others."""

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
        """Return when `attempt` succeeded, asked at this call's turn: right behind that of the same
        owner's last one, if any waits in this line."""
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
        if not self._waiting[turns[0]].attempt():
            return False
        turns.popleft().set_result(None)
        self._lines.move_to_end(line)  # the others come first next time
        return True
