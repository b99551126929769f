"""Many watchers of one process ask the gateway together: one request for all their sessions."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from perdure.errors import NotFound
from perdure.gateway.base import SessionSummary

GATHER_S = 1.0
"""Seconds in which watchers join a request; each looks every few seconds."""
MOST = 1000
"""Sessions of one request."""
Summaries = Callable[[Sequence[str]], Awaitable[Mapping[str, SessionSummary]]]


class SharedLooks:
    """`summaries` is asked once for all the sessions that are looked at within `gather_s`."""

    def __init__(self, summaries: Summaries, gather_s: float = GATHER_S) -> None:
        self._summaries = summaries
        self._gather_s = gather_s
        self._asked: dict[str, asyncio.Future[SessionSummary]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def look(self, session_id: str) -> SessionSummary:
        """Raises: NotFound, and what `summaries` raises."""
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
                    answer.exception()  # a watcher that has left does not read it


def _answer(
    asked: Mapping[str, "asyncio.Future[SessionSummary]"], found: Mapping[str, SessionSummary]
) -> None:
    for name, answer in asked.items():
        if (summary := found.get(name)) is not None:
            answer.set_result(summary)
        else:
            answer.set_exception(NotFound(f"no session {name!r}"))
            answer.exception()
