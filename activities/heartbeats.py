"""Heartbeats of the running activity, and the progress that they report."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from temporalio import activity

FIRST_BEAT_S = 1.0
"""Seconds before the first heartbeat. A shorter activity sends none, which saves server load."""


@dataclass(frozen=True)
class Beats:
    """When an activity sends heartbeats, after the first one."""

    share: float
    """Of the heartbeat timeout, between two heartbeats."""
    pause_s: float
    """Maximum seconds between two heartbeats. A cancelled activity learns of it from the answer."""


STAGE = Beats(share=1 / 3, pause_s=10.0)
WATCH = Beats(share=0.71, pause_s=60.0)
"""For the watch of an agent. It lasts long, and Temporal Cloud bills each heartbeat as an action.
Few heartbeats are enough: the host reports dead workers (`workers.host.worker_deaths`), and the
gateway ends the calls of a stopped agent."""

_progress: ContextVar[dict[str, Any]] = ContextVar("progress")


@contextlib.asynccontextmanager
async def heartbeats(beats: Beats) -> AsyncIterator[None]:
    """Send heartbeats. Their answers also tell the activity that it has been cancelled."""
    _progress.set({})
    timeout = activity.info().heartbeat_timeout
    if timeout is None:
        yield
        return
    pause = min(timeout.total_seconds() * beats.share, beats.pause_s)
    task = asyncio.create_task(_beat(pause))
    try:
        yield
    finally:
        task.cancel()


async def _beat(pause: float) -> None:
    await asyncio.sleep(min(pause, FIRST_BEAT_S))
    while True:
        progress = _progress.get()
        activity.heartbeat(*([progress] if progress else []))
        await asyncio.sleep(pause)


def report(**progress: Any) -> None:
    """Show this next to the pending activity in the Web UI, with the next heartbeat. Keep it
    small."""
    _progress.get().update(progress)
