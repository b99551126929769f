"""boot_sandbox, run_agent, stop_calls, capture_diff, grade_in_fresh_sandbox, emit_episode,
destroy_sandbox: the activities of a rollout's stages in `perdure.rollouts`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity
from temporalio.service import RPCError

from activities.activity_context import RunningActivityAttempt
from activities.activity_decorator import shell
from activities.heartbeats import WATCH
from perdure.client import temporal_names
from perdure.rollouts.activity_messages import (
    AgentRun,
    Attempt,
    Booted,
    Captured,
    Ending,
    GradedPatch,
)
from perdure.rollouts.agent_stage import run_agent, stop_calls
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import boot
from perdure.rollouts.capture_stage import capture
from perdure.rollouts.cleanup_stage import destroy
from perdure.rollouts.episode_stage import emit_episode
from perdure.rollouts.gateway_session.session_cleanup import forget_sessions
from perdure.rollouts.grade_stage import grade
from perdure.rollouts.sandbox.store_outage_keepalive import extend_ttl_on_store_outage
from perdure.rollouts.stage_services import Services
from perdure.types import EpisodeRef

SAY_AFTER_S = 2.0
"""Seconds after which a boot sends its signal. A shorter boot sends none."""


class Stages:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("boot_sandbox")
    async def boot(self, attempt: Attempt) -> Booted:
        async with _said_if_it_lasts(attempt.attempt):
            return await boot(
                await Job.of(self.services, attempt, RunningActivityAttempt(), first=True)
            )

    @shell("run_agent", leave_at_once=True, beats=WATCH)
    async def run_agent(self, attempt: Attempt) -> AgentRun:
        async with extend_ttl_on_store_outage(self.services, attempt):
            return await run_agent(await self._job(attempt))

    @shell("stop_calls")
    async def stop_calls(self, attempt: Attempt) -> None:
        await stop_calls(await self._job(attempt))

    @shell("capture_diff")
    async def capture(self, attempt: Attempt) -> Captured:
        async with extend_ttl_on_store_outage(self.services, attempt):
            return await capture(await self._job(attempt))

    @shell("grade_in_fresh_sandbox")
    async def grade(self, attempt: Attempt) -> GradedPatch:
        return await grade(await self._job(attempt))

    @shell("emit_episode")
    async def emit(self, ending: Ending) -> EpisodeRef:
        episode = await emit_episode(self.services.store, ending, self._turns_again)
        await forget_sessions(self.services, ending, episode)
        return episode

    @shell("destroy_sandbox")
    async def destroy(self, attempt: Attempt) -> None:
        await destroy(await self._job(attempt))

    async def _job(self, attempt: Attempt) -> Job:
        return await Job.of(self.services, attempt, RunningActivityAttempt())

    async def _turns_again(self, session_id: str) -> None:
        """Ask the gateway only if turns are lost, because its settings may be wrong."""
        await self.services.gateway.write_turns(session_id)


@asynccontextmanager
async def _said_if_it_lasts(attempt: int) -> AsyncIterator[None]:
    """Signal the rollout that it no longer waits. Only this try knows that it has a seat."""
    saying = asyncio.create_task(_say(attempt))
    try:
        yield
    finally:
        saying.cancel()


async def _say(attempt: int) -> None:
    await asyncio.sleep(SAY_AFTER_S)
    rollout = activity.client().get_workflow_handle(activity.info().workflow_id or "")
    with contextlib.suppress(RPCError):  # if this fails, the Web UI shows it as waiting
        await rollout.signal(temporal_names.BOOTING, attempt)
