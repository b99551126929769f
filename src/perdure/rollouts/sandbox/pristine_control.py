"""A control: after a step has failed for an agent, take the diff of a pristine tree in a new
sandbox.

If the control fails too, the host or the provider may be the cause, so the failure is not a
verdict.
"""

import asyncio

from perdure import durable_files
from perdure.errors import PerdureError
from perdure.graders.diff.diff_capture import capture
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import base_git_of, pristine_git
from perdure.sandboxes.base import Network, SandboxSpec

CONTROL_S = 180.0
"""Seconds after which a control counts as failed."""


async def sandboxes_work(job: Job) -> bool:
    """Whether a new sandbox of the agent's provider boots and a diff of its tree can be taken.

    It takes no permit: on a metered account, kill the agent's sandbox first.
    """
    try:
        async with asyncio.timeout(CONTROL_S):
            works = await _diff_can_be_taken(job)
    except (PerdureError, OSError):  # TimeoutError is an OSError
        works = False
    if not works:
        durable_files.forget_checked_folders()  # finds a damaged environment, which is then rebuilt
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
    await plan.provider.kill(identity)  # an earlier try may have left it
    async with plan.admission.starting():
        created = await plan.provider.create(spec, identity)
    async with created as sandbox:
        base = await base_git_of(job, sandbox, prepared)
        await sandbox.put(f"{sandbox.workdir}/perdure-control.txt", b"control\n")
        return not (await capture(sandbox, base)).refused
