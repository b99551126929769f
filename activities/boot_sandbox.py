"""boot_sandbox: the shell of `perdure.rollouts.boot`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity
from temporalio.service import RPCError

from activities.activity_context import ThisTry
from activities.shell import shell
from perdure.client import names
from perdure.rollouts.boot import boot
from perdure.rollouts.job import Job
from perdure.rollouts.messages import Attempt, Booted
from perdure.rollouts.services import Services

SAY_AFTER_S = 2.0
"""A shorter boot is not worth a signal."""


class BootSandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("boot_sandbox")
    async def boot(self, attempt: Attempt) -> Booted:
        async with _said_if_it_lasts(attempt.attempt):
            return await boot(await Job.of(self.services, attempt, ThisTry(), first=True))


@asynccontextmanager
async def _said_if_it_lasts(attempt: int) -> AsyncIterator[None]:
    """Tell the rollout that it no longer waits: only this try knows that it has a seat."""
    saying = asyncio.create_task(_say(attempt))
    try:
        yield
    finally:
        saying.cancel()


async def _say(attempt: int) -> None:
    await asyncio.sleep(SAY_AFTER_S)
    rollout = activity.client().get_workflow_handle(activity.info().workflow_id or "")
    with contextlib.suppress(RPCError):  # then it is shown as waiting
        await rollout.signal(names.BOOTING, attempt)
