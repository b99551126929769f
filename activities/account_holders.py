"""closed_holders and end_ready: what an account's workflow asks when sandboxes are short."""

import asyncio
from collections.abc import Sequence

from activities import activity_context
from activities.shell import shell
from perdure.rollouts.messages import ReadyPermit
from perdure.rollouts.sandbox.admission import end_ready
from perdure.rollouts.services import Services


class ClosedHolders:
    @shell("closed_holders")
    async def closed(self, holders: Sequence[str]) -> list[str]:
        """Those whose workflow is closed: terminated, or lost before it gave its permit back."""
        return [holder for holder in holders if not await activity_context.is_open(holder)]


class EndReady:
    """Ends sandboxes that were booted ahead, for rollouts that wait for a permit."""

    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("end_ready")
    async def end(self, permits: Sequence[ReadyPermit]) -> list[str]:
        """Holders of those that are gone, without those that a rollout has taken meanwhile."""
        ended = await asyncio.gather(*(end_ready(self.services, permit) for permit in permits))
        return [permit.holder for permit, gone in zip(permits, ended, strict=True) if gone]
