"""sweep_sandboxes and closed_holders: find sandboxes and permits that a workflow left behind."""

from collections.abc import Sequence

from temporalio import activity

from activities import activity_context
from activities.activity_decorator import shell
from perdure.rollouts.activity_messages import SweepRequest
from perdure.rollouts.home_sweep import sweep
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.sandbox_reaper import Owner, SweepReport


class SweepActivities:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("sweep_sandboxes")
    async def sweep(self, request: SweepRequest) -> SweepReport:
        return await sweep(self.services, _fate, request.grace_s)

    @shell("closed_holders")
    async def closed_holders(self, holders: Sequence[str]) -> list[str]:
        """The holders whose workflow closed without releasing its permit, for example
        terminated."""
        fates = [await _fate(holder) for holder in holders]
        return [
            holder for holder, fate in zip(holders, fates, strict=True) if fate is not Owner.ALIVE
        ]


async def _fate(workflow_id: str) -> Owner:
    return await activity_context.fetch_owner_state(activity.client(), workflow_id)
