"""Controls: whether sandboxes work now, in which what an agent left cannot be judged.

A verdict that the host or the provider could cause counts only if the same steps succeed on a pristine
tree right afterwards.
"""

import asyncio

from perdure import durable_files
from perdure.errors import PerdureError, RateLimited
from perdure.graders.diff.capture import capture
from perdure.rollouts.boot import base_git_of, pristine_git
from perdure.rollouts.job import Job
from perdure.sandboxes.base import Network, SandboxSpec

CONTROL_S = 180.0
"""Seconds for one control; one that takes longer has failed."""


async def sandboxes_work(job: Job) -> bool:
    """Whether a new sandbox of the agent's provider boots, and the diff of its tree can be taken.

    Raises: RateLimited when the account has no room for it.
    """
    provider = job.agent_sandbox.placement.provider
    return await job.services.controls.succeeds(provider, lambda: _control(job))


async def _control(job: Job) -> bool:
    try:
        async with asyncio.timeout(CONTROL_S):
            works = await _diff_can_be_taken(job)
    except RateLimited:
        raise
    except (PerdureError, OSError):  # TimeoutError is an OSError
        works = False
    if not works:
        durable_files.check_again()  # a damaged environment is built again
    return works


async def _diff_can_be_taken(job: Job) -> bool:
    plan = job.agent_sandbox
    prepared = await job.prepared(plan)
    spec = SandboxSpec(
        workdir=prepared.workdir,
        tree=prepared.tree,
        image=prepared.image,
        mounts=(*prepared.mounts, *pristine_git(prepared)),
        env=prepared.env,
        limits=plan.placement.limits,
        network=Network.NONE,
        labels={**job.labels("agent"), "purpose": "control"},
        ttl_s=2 * CONTROL_S,
    )
    identity = f"{job.agent_identity}-control"
    await plan.provider.kill(identity)  # of an earlier try
    async with await plan.provider.create(spec, identity) as sandbox:
        base = await base_git_of(job, sandbox, prepared)
        await sandbox.put(f"{sandbox.workdir}/perdure-control.txt", b"control\n")
        return not (await capture(sandbox, base)).refused
