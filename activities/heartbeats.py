"""Heartbeats of the running activity, and the progress that they report."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from temporalio import activity

FIRST_BEAT_S = 1.0
"""An activity that ends sooner costs the server no heartbeat at all."""
LATER_BEATS_S = 10.0
"""At most: a cancelled activity learns of it by the answer. With thousands of agents heartbeats are most of
what the server does."""

_progress: ContextVar[dict[str, Any]] = ContextVar("progress")


@contextlib.asynccontextmanager
async def heartbeats() -> AsyncIterator[None]:
    """Send heartbeats at a third of the time-out. Their answers also tell the activity that it was
    cancelled."""
    _progress.set({})
    timeout = activity.info().heartbeat_timeout
    if timeout is None:
        yield
        return
    task = asyncio.create_task(_beat(timeout.total_seconds() / 3))
    try:
        yield
    finally:
        task.cancel()


async def _beat(interval: float) -> None:
    pause = min(interval, FIRST_BEAT_S)
    while True:
        await asyncio.sleep(pause)
        progress = _progress.get()
        activity.heartbeat(*([progress] if progress else []))
        pause = min(interval, LATER_BEATS_S)


def report(**progress: Any) -> None:
    """Show this beside the pending activity in the Web UI with the next heartbeat. Keep it tiny."""
    _progress.get().update(progress)
