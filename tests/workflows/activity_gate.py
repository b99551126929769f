"""Agents that a test holds and releases."""

import asyncio
from typing import Any

from temporalio import activity

from perdure.rollouts.activity_messages import AgentRun
from perdure.types import AgentEnd
from tests.stack.wait_until import PATIENCE_S


class Gate:
    """Agents that finish only when the test releases them, and report when they have started."""

    def __init__(self, progress: dict[str, Any] | None = None) -> None:
        """`progress`: the details of their heartbeats."""
        self._beat = [progress] if progress else []
        self.running: set[str] = set()
        self.most = 0
        self.open = asyncio.Event()
        self.changed = asyncio.Condition()

    async def agent(self, attempt: Any) -> AgentRun:
        name = f"{attempt.request.instance_id}#{attempt.request.sample_index}"
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        async with self.changed:
            self.changed.notify_all()
        try:
            while not self.open.is_set():
                activity.heartbeat(*self._beat)
                await asyncio.wait([asyncio.ensure_future(self.open.wait())], timeout=0.2)
        finally:
            self.running.discard(name)
        return AgentRun(end=AgentEnd.FINISHED)

    async def until_running(self, n: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: len(self.running) >= n)
