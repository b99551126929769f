"""Deletes the gateway sessions of a graded rollout, whose turns are in the store as `turns.parquet`.

No further attempt will replay them. A cancelled or failed rollout keeps its sessions: when it is
started again, the next attempt replays them. A rollout whose turns are lost keeps them too: a regrade
rebuilds the turns from the journal once that is readable again.
"""

import asyncio
import contextlib

import structlog

from perdure.agents.base import TakesMessages
from perdure.errors import AttemptDamaged, PerdureError
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import AgentRun, Ending
from perdure.rollouts.simulated_user import user_model
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import identity_of
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import EpisodeRef, RolloutRequest, RolloutStatus

PATIENCE_S = 20.0
"""Seconds. The episode is written, so an unavailable gateway must not delay the rollout."""

log = structlog.get_logger()


async def forget_sessions(services: Services, ending: Ending, episode: EpisodeRef) -> None:
    """Delete the sessions. Idempotent. Sessions that cannot be deleted now stay in the journal."""
    if ending.status is not RolloutStatus.GRADED:
        return
    if not episode.turns and await _had_turns(services.store, ending):
        return
    request = ending.request
    numbers = range(1, ending.attempts + 1)
    sessions = [identity_of(request.run_id, request.workflow_id, "agent", n) for n in numbers]
    if _may_have_user(services, request):
        sessions.append(user_model.session_of(request))
    for session_id in sessions:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await services.gateway.forget(session_id)
        except (PerdureError, TimeoutError) as error:
            log.info("the journal keeps a session", session_id=session_id, error=str(error))
            return


def _may_have_user(services: Services, request: RolloutRequest) -> bool:
    try:
        return isinstance(services.agent(request.agent), TakesMessages)
    except PerdureError:  # this worker lacks the agent's module
        return True


async def _had_turns(store: Store, ending: Ending) -> bool:
    """Whether the last attempt called a model."""
    key = f"{store_keys.attempt(ending.request, ending.attempts)}/agent.json"
    with contextlib.suppress(AttemptDamaged):
        run = await stage_checkpoints.read(store, key, AgentRun)
        return run is not None and run.turns > 0
    return False
