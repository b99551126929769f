"""Calls that wait for an engine: in turn by run, so that a large run does not starve a small one."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable


class FairQueue:
    """One line per run; the runs take turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._tries: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def __len__(self) -> int:
        return len(self._tries)

    async def wait(self, run: str, attempt: Callable[[], bool]) -> None:
        """Return when `attempt` succeeded, asked at this call's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(run, deque()).append(turn)
        self._tries[turn] = attempt
        try:
            await turn
        finally:
            self._leave(run, turn)

    def _leave(self, run: str, turn: "asyncio.Future[None]") -> None:
        self._tries.pop(turn, None)
        line = self._lines.get(run)
        if line is not None and turn in line:
            line.remove(turn)
        if line is not None and not line:
            self._lines.pop(run, None)

    def serve(self) -> None:
        """Let in whoever finds room now, one of each run after the other."""
        served = True
        while served:
            served = False
            for run in list(self._lines):
                served = self._serve_one(run) or served

    def _serve_one(self, run: str) -> bool:
        line = self._lines[run]
        while line and line[0].done():  # given up meanwhile
            line.popleft()
        if not line:
            self._lines.pop(run)
            return False
        if not self._tries[line[0]]():
            return False
        line.popleft().set_result(None)
        self._lines.move_to_end(run)  # the others come first next time
        return True
