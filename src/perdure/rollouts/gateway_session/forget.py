"""Forgets the gateway sessions of a graded rollout, whose turns are in the store as `turns.parquet`.

No attempt of it follows. A rollout that was cancelled or failed keeps its sessions: when it is started
again, the next attempt replays them.
"""

import asyncio

import structlog

from perdure.errors import PerdureError
from perdure.rollouts.messages import Ending
from perdure.rollouts.services import Services
from perdure.sandboxes.base import identity_of
from perdure.types import RolloutStatus

PATIENCE_S = 20.0
"""The episode is written: a gateway that is away must not hold the rollout."""

log = structlog.get_logger()


async def forget_sessions(services: Services, ending: Ending) -> None:
    """Repeating is harmless. What cannot be deleted now stays in the journal."""
    if ending.status is not RolloutStatus.GRADED:
        return
    request = ending.request
    for number in range(1, ending.attempts + 1):
        session_id = identity_of(request.run_id, request.workflow_id, "agent", number)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await services.gateway.forget(session_id)
        except (PerdureError, TimeoutError) as error:
            log.info("the journal keeps a session", session_id=session_id, error=str(error))
            return
