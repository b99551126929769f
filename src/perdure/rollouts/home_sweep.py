"""The reaper of one home: kills sandboxes whose workflow is closed."""

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from perdure.errors import PerdureError
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import SandboxInfo, SandboxProvider
from perdure.sandboxes.sandbox_reaper import Owner, Sweep, SweepReport

FetchOwnerState = Callable[[str], Awaitable[Owner]]
"""What the Temporal server says about the workflow with this id."""


async def sweep(
    services: Services,
    fetch_owner_state: FetchOwnerState,
    grace_s: float,
    providers: Sequence[SandboxProvider] | None = None,
) -> SweepReport:
    """`providers`: if None, all providers that may have sandboxes of this home."""

    async def owner_of(info: SandboxInfo) -> Owner:
        workflow_id = info.labels.get("rollout")
        if workflow_id is None:
            return Owner.ALIVE  # Perdure did not make it
        return await fetch_owner_state(workflow_id)

    async def orphaned(info: SandboxInfo) -> None:
        """Close the agent's session, so that it makes no more model calls. Both have one name."""
        services.seats.leave(info.identity)
        if info.labels.get("purpose") == "agent":
            with contextlib.suppress(PerdureError):  # it never called a model, or no gateway runs
                await services.gateway.close(info.identity)

    swept = services.providers_used() if providers is None else providers
    return await Sweep(owner_of, orphaned, grace_s, time.time()).over(swept)
