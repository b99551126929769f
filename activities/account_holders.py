"""closed_holders: what an account's workflow asks when sandboxes are short."""

from collections.abc import Sequence

from temporalio import activity

from activities import activity_context
from activities.shell import shell
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
