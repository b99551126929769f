"""sweep_sandboxes: the shell of `perdure.rollouts.sweep`, the reaper."""

from activities.activity_context import is_open
from activities.shell import shell
from perdure.rollouts.messages import SweepRequest
from perdure.rollouts.services import Services
from perdure.rollouts.sweep import sweep
from perdure.sandboxes.reaper import SweepReport


class SweepSandboxes:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("sweep_sandboxes")
    async def sweep(self, request: SweepRequest) -> SweepReport:
        return await sweep(self.services, is_open, request.grace_s)
