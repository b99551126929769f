"""Cleans up after an attempt that ends early: kills its sandboxes, releases their permits, closes
its session."""

import contextlib
from collections.abc import Sequence

from perdure.errors import AttemptDamaged
from perdure.rollouts.attempt_job import Job, SandboxPlan
from perdure.rollouts.boot_stage import CHECKPOINT
from perdure.rollouts.gateway_session.gateway_session import session_of


async def destroy(job: Job) -> None:
    identity = job.agent_identity
    await _kill(job.agent_sandbox, [identity])
    job.services.seats.leave(identity)
    job.services.held.pop(identity, None)
    await _kill(job.grade_sandbox, job.grade_identities)
    await _close_session(job)


async def _kill(plan: SandboxPlan, identities: Sequence[str]) -> None:
    for identity in identities:
        await plan.provider.kill(identity)
    await plan.admission.release()


async def _close_session(job: Job) -> None:
    """Keep the attempt's turns, which are evidence, even if the agent's watcher died."""
    if not await job.services.store.exists(job.key(CHECKPOINT)):
        return  # no sandbox was booted, so there is no session, and perhaps no gateway
    session = session_of(job)
    if session is not None:
        with contextlib.suppress(AttemptDamaged):  # there is no session if the agent did not start
            await session.close()
