"""Creates the sandbox of a stage, and does not kill it if a later try of the stage may own it.

If the heartbeats of a try are late, Temporal starts another try, and both use the same sandbox
identity. The first try learns of that later and must not kill the sandbox of the second.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from perdure import tracing
from perdure.errors import PerdureError, RetryHere
from perdure.rollouts.attempt_job import ActivityAttempt
from perdure.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec

log = structlog.get_logger("perdure.sandbox")


async def create_sandbox(
    activity_attempt: ActivityAttempt, provider: SandboxProvider, spec: SandboxSpec, identity: str
) -> Sandbox:
    """Call `provider.create`. A cancelled try leaves no sandbox, unless another try may own it."""
    with tracing.span("boot sandbox", {"perdure.provider": provider.name}):
        return await _created(activity_attempt, provider, spec, identity)


async def _created(
    activity_attempt: ActivityAttempt, provider: SandboxProvider, spec: SandboxSpec, identity: str
) -> Sandbox:
    creating = asyncio.ensure_future(provider.create(spec, identity))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        superseded = activity_attempt.is_superseded()
        if not superseded:
            creating.cancel()
        while not creating.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([creating])
        created = not creating.cancelled() and creating.exception() is None
        if created and not (superseded and await activity_attempt.workflow_may_be_open()):
            with contextlib.suppress(PerdureError):  # if this fails, the reaper kills it
                await asyncio.shield(provider.kill(identity))
        raise


@asynccontextmanager
async def kill_on_exit(activity_attempt: ActivityAttempt, sandbox: Sandbox) -> AsyncIterator[None]:
    """Kill the sandbox at the end, unless another try may own a sandbox of the same identity."""
    is_anothers = False
    try:
        yield
    except asyncio.CancelledError:
        is_anothers = (
            activity_attempt.is_superseded() and await activity_attempt.workflow_may_be_open()
        )
        raise
    finally:
        if not is_anothers:
            try:
                await asyncio.shield(sandbox.kill())
            except RetryHere as error:  # its work is done, and the sweep kills it
                log.warning("sandbox not killed", identity=sandbox.identity, reason=str(error))
