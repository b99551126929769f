"""Heartbeats of the running activity, and the progress that they report."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from temporalio import activity

FIRST_BEAT_S = 1.0
"""Seconds before the first heartbeat. A shorter activity sends none, which saves server load."""
LATER_BEATS_S = 10.0
"""Maximum seconds between heartbeats. Shorter: a cancelled activity learns of it sooner, from the
answer. Longer: less load, because with thousands of agents most of the server's work is
heartbeats."""

_progress: ContextVar[dict[str, Any]] = ContextVar("progress")


@contextlib.asynccontextmanager
async def heartbeats() -> AsyncIterator[None]:
    """Send heartbeats at a third of the timeout. Their answers also tell the activity that it has
    been cancelled."""
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
    """Show this next to the pending activity in the Web UI, with the next heartbeat. Keep it
    small."""
    _progress.get().update(progress)
