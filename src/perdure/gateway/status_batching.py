"""Batches the session lookups of one process: many watchers share one request to the gateway."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from perdure.errors import NotFound
from perdure.gateway.base import SessionSummary

GATHER_S = 1.0
"""Seconds that a request waits for more watchers to join. Each watcher looks every few seconds."""
MOST = 1000
"""Sessions in one request."""
Summaries = Callable[[Sequence[str]], Awaitable[Mapping[str, SessionSummary]]]


class SummaryBatcher:
    """Calls `summaries` once for all sessions that watchers look up within `gather_s`."""

    def __init__(self, summaries: Summaries, gather_s: float = GATHER_S) -> None:
        self._summaries = summaries
        self._gather_s = gather_s
        self._asked: dict[str, asyncio.Future[SessionSummary]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def look(self, session_id: str) -> SessionSummary:
        """Raises: NotFound, and any error of `summaries`."""
        answer = self._asked.get(session_id)
        if answer is None:
            if not self._asked:
                self._ask_soon()
            answer = self._asked[session_id] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(answer)

    def _ask_soon(self) -> None:
        task = asyncio.create_task(self._ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self) -> None:
        await asyncio.sleep(self._gather_s)
        asked, self._asked = self._asked, {}
        names = list(asked)
        for first in range(0, len(names), MOST):
            part = {name: asked[name] for name in names[first : first + MOST]}
            try:
                _answer(part, await self._summaries(list(part)))
            except Exception as error:
                for answer in part.values():
                    answer.set_exception(error)
                    answer.exception()  # marks it as seen: a cancelled watcher never reads it


def _answer(
    asked: Mapping[str, "asyncio.Future[SessionSummary]"], found: Mapping[str, SessionSummary]
) -> None:
    for name, answer in asked.items():
        if (summary := found.get(name)) is not None:
            answer.set_result(summary)
        else:
            answer.set_exception(NotFound(f"no session {name!r}"))
            answer.exception()
