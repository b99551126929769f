"""The periodic tasks of a worker for its host, which add no events to Temporal's histories."""

import asyncio
import contextlib

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from activities.activity_context import fetch_owner_state
from activities.activity_decorator import at_work
from perdure import home_folder
from perdure.errors import PerdureError
from perdure.rollouts.home_sweep import sweep
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import SandboxProvider
from perdure.sandboxes.sandbox_reaper import Owner
from perdure.telemetry import metrics

SWEEP_EVERY_S = 30.0
UNKNOWN_FOR_S = 600.0
"""Seconds after its boot at which a sandbox is killed if the server does not know its workflow."""
COUNT_EVERY_S = 15.0

log = structlog.get_logger("perdure.worker")


async def sweep_often(client: Client, services: Services) -> None:
    """Kill this host's sandboxes whose workflow was terminated while no activity here worked for
    it.

    The scheduled reaper does the same for all providers, but only every ten minutes, because each
    of its sweeps costs events and provider requests. This sweep costs neither.
    """

    async def fate(workflow_id: str) -> Owner:
        """Skip the request for rollouts with an activity here, whose heartbeats report the end."""
        return Owner.ALIVE if at_work[workflow_id] else await fetch_owner_state(client, workflow_id)

    usable: set[str] = set()
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        try:
            providers = await asyncio.to_thread(_usable_here, services, usable)
            await sweep(services, fate, UNKNOWN_FOR_S, providers)
        except (RPCError, PerdureError, OSError) as error:
            log.warning("cannot sweep this host", reason=str(error))


def _usable_here(services: Services, usable: set[str]) -> list[SandboxProvider]:
    """Providers whose sandboxes are processes of this host, which can be listed at no cost.

    Providers in `usable` stay usable. The others are checked at each sweep, because a busy host may
    refuse the trial sandbox of a check.
    """
    bound = [provider for provider in services.providers_used() if provider.host_bound]
    found = [provider for provider in bound if provider.name in usable or not provider.check()]
    usable.update(provider.name for provider in found)
    return found


async def count_sandboxes(services: Services) -> None:
    """Update the gauges of this host's live sandboxes and seats, if this worker serves metrics."""
    while services.settings.metrics.port:
        metrics.seats(services.seats.most, services.seats.agents())
        for name in home_folder.list_recorded_providers(services.home):
            with contextlib.suppress(PerdureError):
                alive = sum(box.alive for box in await services.provider(name).list())
                metrics.sandboxes_alive(name, alive)
        await asyncio.sleep(COUNT_EVERY_S)
