"""The reaper of one home. It kills sandboxes whose workflow is closed."""

import time
from collections.abc import Awaitable, Callable

from perdure.rollouts.sandbox import ready
from perdure.rollouts.services import Services
from perdure.sandboxes import reaper
from perdure.sandboxes.base import SandboxInfo
from perdure.sandboxes.reaper import SweepReport

IsOpen = Callable[[str], Awaitable[bool]]
"""Whether the workflow with this id is open, from the server itself."""


async def sweep(services: Services, is_open: IsOpen, grace_s: float) -> SweepReport:
    async def is_owned(info: SandboxInfo) -> bool:
        workflow_id = info.labels.get("rollout")
        if workflow_id is None:
            return True  # Perdure did not make it
        if workflow_id.startswith(ready.OWNER):
            taker = await ready.owner_of(services.store, workflow_id)
            return taker is None or await is_open(taker)  # its deadline ends a ready one
        return await is_open(workflow_id)

    return await reaper.sweep(services.providers_used(), is_owned, grace_s=grace_s, now=time.time())
