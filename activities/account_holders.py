"""closed_holders and end_ready: what an account's workflow asks when sandboxes are short."""

import asyncio
from collections.abc import Sequence

from temporalio import activity

from activities import activity_context
from activities.shell import shell
from perdure.rollouts.messages import ReadyPermit
from perdure.rollouts.sandbox.admission import end_ready
from perdure.rollouts.services import Services
from perdure.sandboxes.reaper import Owner


class ClosedHolders:
    @shell("closed_holders")
    async def closed(self, holders: Sequence[str]) -> list[str]:
        """Those whose workflow is closed: terminated, or lost before it gave its permit back."""
        server = activity.client()
        fates = [await activity_context.fate_of(server, holder) for holder in holders]
        return [
            holder for holder, fate in zip(holders, fates, strict=True) if fate is not Owner.ALIVE
        ]


class EndReady:
    """Ends sandboxes that were booted ahead, for rollouts that wait for a permit."""

    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("end_ready")
    async def end(self, permits: Sequence[ReadyPermit]) -> list[str]:
        """Holders of those that are gone, without those that a rollout has taken meanwhile."""
        ended = await asyncio.gather(*(end_ready(self.services, permit) for permit in permits))
        return [permit.holder for permit, gone in zip(permits, ended, strict=True) if gone]
