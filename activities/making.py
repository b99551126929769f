"""Sandboxes that an activity makes: a try that is called off leaves alone what the next one may own.

Whoever's heartbeats come late is at work for nothing: another try has begun, and both know the
sandbox by one identity. The first hears of it afterwards, and must not kill what is the second's.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity
from temporalio.service import RPCError

from activities.admission import is_open
from perdure.errors import PerdureError
from perdure.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec


async def make(provider: SandboxProvider, spec: SandboxSpec, identity: str) -> Sandbox:
    """`create` for an activity. Called off, it leaves nothing, or what another try may own."""
    making = asyncio.ensure_future(provider.create(spec, identity))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        superseded = is_superseded()
        if not superseded:
            making.cancel()
        while not making.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([making])
        made = not making.cancelled() and making.exception() is None
        if made and not (superseded and await _is_owned()):
            with contextlib.suppress(PerdureError):  # then the reaper comes
                await asyncio.shield(provider.kill(identity))
        raise


@asynccontextmanager
async def ending(sandbox: Sandbox) -> AsyncIterator[None]:
    """Kills it in the end, unless another try of this activity may have one of its identity."""
    owned = False
    try:
        yield
    except asyncio.CancelledError:
        owned = is_superseded() and await _is_owned()
        raise
    finally:
        if not owned:
            await asyncio.shield(sandbox.kill())


def is_superseded() -> bool:
    """Inside `except CancelledError`: neither the workflow nor this worker's end called it off."""
    details = activity.cancellation_details()
    return details is not None and not (details.cancel_requested or details.worker_shutdown)


async def _is_owned() -> bool:
    """An open workflow has another try at work, or kills by identity in its clean-up."""
    try:
        return await is_open(activity.info().workflow_id or "")
    except RPCError:
        return True  # the reaper asks again
