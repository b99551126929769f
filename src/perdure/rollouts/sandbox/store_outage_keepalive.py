"""Keeps an agent's sandbox alive while the store is unavailable.

Then a stage fails at its first read, before it reaches the sandbox. Without this module, the
sandbox would reach its TTL with the agent's finished work in it, and its seat would lapse.
"""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from perdure.errors import PerdureError, StoreUnavailable
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import identity_of


@asynccontextmanager
async def extend_ttl_on_store_outage(services: Services, attempt: Attempt) -> AsyncIterator[None]:
    try:
        yield
    except StoreUnavailable:
        with contextlib.suppress(PerdureError):  # the next try extends it again
            await _extend(services, attempt)
        raise


async def _extend(services: Services, attempt: Attempt) -> None:
    """If this process has not attached to the sandbox, the provider is the one the request
    names."""
    request = attempt.request
    identity = identity_of(request.run_id, request.workflow_id, "agent", attempt.attempt)
    provider = services.held.get(identity) or phase_specs.place(request, None, "agent").provider
    sandbox = await services.provider(provider).attach(identity)
    await sandbox.touch(services.settings.sandbox.ttl_s)
    services.seats.take(identity)
