"""sweep_sandboxes: the shell of `perdure.rollouts.sweep`, the reaper."""

from temporalio import activity

from activities.activity_context import fate_of
from activities.shell import shell
from perdure.rollouts.messages import SweepRequest
from perdure.rollouts.services import Services
from perdure.rollouts.sweep import sweep
from perdure.sandboxes.reaper import Owner, SweepReport


class SweepSandboxes:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("sweep_sandboxes")
    async def sweep(self, request: SweepRequest) -> SweepReport:
        return await sweep(self.services, _fate, request.grace_s)


async def _fate(workflow_id: str) -> Owner:
    return await fate_of(activity.client(), workflow_id)
