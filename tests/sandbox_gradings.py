"""Grades patches in fresh sandboxes of a prepared tree, for suites that attack the graders."""

import contextlib
from uuid import uuid4

from perdure.errors import RetryHere, SandboxLost
from perdure.graders.base import Graded, Grader
from perdure.graders.twins.paired_runs import Verified, verified
from perdure.instances.environment_builder import Prepared
from perdure.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from perdure.types import Instance, Limits

TIMEOUT_S = 60.0
"""Of the tests of one run: a busy host is slow."""
TRIES = 3
"""Of one run of the tests whose sandbox fails: on a starved host, as Temporal would."""
LIMITS = Limits(memory_mb=2048, disk_mb=512, pids=128, output_mb=64)


async def fresh_sandbox(provider: SandboxProvider, made: Prepared) -> Sandbox:
    spec = SandboxSpec(
        workdir=made.workdir, tree=made.tree, mounts=made.mounts, env=made.env, limits=LIMITS
    )
    return await provider.create(spec, f"p-graded-{uuid4().hex[:10]}")


async def graded(
    provider: SandboxProvider,
    made: Prepared,
    grader: Grader,
    instance: Instance,
    patch: bytes,
    *,
    pairs: int,
) -> Verified:
    """Raises: InstanceError; SandboxLost or RetryHere after TRIES."""

    async def once(instance: Instance) -> Graded:
        for _ in range(TRIES - 1):
            with contextlib.suppress(RetryHere, SandboxLost):
                return await in_sandbox(instance)
        return await in_sandbox(instance)

    async def in_sandbox(instance: Instance) -> Graded:
        async with await fresh_sandbox(provider, made) as sandbox:
            return await grader.grade(sandbox, instance, patch, timeout_s=TIMEOUT_S)

    return await verified(instance, pairs, once)
