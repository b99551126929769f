"""sweep_sandboxes: the reaper. Who owns a sandbox is decided by its workflow, not by memory."""

import time

from activities import ready
from activities.admission import is_open
from activities.messages import SweepRequest, Swept
from activities.services import Services
from activities.shell import shell
from perdure import home
from perdure.errors import PerdureError
from perdure.sandboxes import reaper
from perdure.sandboxes.base import SandboxInfo, SandboxProvider


class SweepSandboxes:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("sweep_sandboxes")
    async def sweep(self, request: SweepRequest) -> Swept:
        swept = await reaper.sweep(
            self._providers(), self._is_owned, grace_s=request.grace_s, now=time.time()
        )
        return Swept(found=swept.found, kept=swept.kept, killed=swept.killed)

    def _providers(self) -> list[SandboxProvider]:
        """An unconfigured provider is skipped, not an alarm."""
        found = []
        for name in home.sandboxes_of(self.services.home):
            try:
                found.append(self.services.provider(name))
            except PerdureError:
                continue
        return found

    async def _is_owned(self, info: SandboxInfo) -> bool:
        """Open workflow = owned."""
        workflow_id = info.labels.get("rollout")
        if workflow_id is None:
            return True  # not one of ours
        if workflow_id.startswith(ready.OWNER):
            taken_by = await ready.owner_of(self.services.store, workflow_id)
            return taken_by is None or await is_open(taken_by)  # its deadline ends a ready one
        return await is_open(workflow_id)
