"""The capture stage: takes the diff as bytes, runs tests that need the agent's sandbox, then kills
the sandbox."""

import contextlib
import hashlib

from perdure import tracing
from perdure.errors import Boundary, NotFound, RetryHere, SandboxLost
from perdure.graders.artifact_transfer import (
    PackedArtifacts,
    pack_artifacts,
    pack_sidecar_artifacts,
)
from perdure.graders.diff import diff_capture as diff
from perdure.rollouts import handler_hooks
from perdure.rollouts.activity_messages import AgentRun, Captured
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import BootRecord, attach
from perdure.rollouts.diff_storage import store_diff
from perdure.rollouts.grade_stage import ARTIFACTS, needs_tests
from perdure.rollouts.in_place_grading import run_in_place
from perdure.rollouts.prediction_application import IGNORED, has_given_patch
from perdure.rollouts.sandbox.pristine_control import CONTROL_S, sandboxes_work
from perdure.rollouts.simulated_user.turn_grading import captured_turns
from perdure.sandboxes.base import Sandbox
from perdure.types import Collect, PatchRef
from perdure.types.containers import MAIN

CHECKPOINT = "patch.json"

REFUSALS = 3
"""Captures in a row that must be refused before the refusal becomes the verdict."""
LONGEST_S = REFUSALS * (diff.LONGEST_S + CONTROL_S)
"""Longest time in seconds until the diff is taken or refused."""
HOST_PAUSE_S = 20.0
"""Seconds before a capture is retried when the control failed too."""


async def capture(job: Job) -> Captured:
    """Raises: SandboxLost."""
    found = await job.once(CHECKPOINT, PatchRef, _take)
    # Kill the agent's sandbox at once, because the grading sandbox needs its memory.
    identity = job.agent_identity
    await job.agent_sandbox.provider.kill(identity)
    job.services.seats.leave(identity)
    job.services.held.pop(identity, None)
    runs = 1 + len(await captured_turns(job))
    return Captured(
        size=found.size,
        files=found.files,
        empty=found.empty,
        too_large=found.too_large,
        waits_for=await _hand_over(job, found),
        grade_timeout_s=runs * (job.request.grade_timeout_s or job.instance.grading.timeout_s),
    )


async def _take(job: Job) -> PatchRef:
    sandbox = await attach(job)
    if not job.instance.grading.in_place:  # such tests may be about a server that the agent started
        await sandbox.end_all()  # a process of the agent could race the capture or kill it
    for one in job.instance.grading.collect:
        await _run_collect(sandbox, one)
    boot = await job.recall("sandbox.json", BootRecord)
    results = await handler_hooks.results_of(job)
    if results is not None and isinstance(results.get("git_patch"), str):
        captured = _given(results["git_patch"], job.services.settings.diff_max_bytes)
    else:
        with tracing.span("take diff"):
            forced = IGNORED if await has_given_patch(job) else ""
            captured = await _captured(job, sandbox, boot.base_git if boot else None, forced)
    patch = await store_diff(job, "patch.diff", captured)
    artifacts, refused = await _artifacts(job, sandbox)
    if job.instance.grading.in_place:
        await run_in_place(job, sandbox)
    kept = {
        "artifacts_size": len(artifacts),
        "artifacts_sha256": hashlib.sha256(artifacts).hexdigest() if artifacts else "",
        "artifacts_refused": refused,
    }
    return patch.model_copy(update=kept)


async def _run_collect(sandbox: Sandbox, collect: Collect) -> None:
    """Raises: SandboxLost."""
    if collect.service == MAIN:
        await sandbox.exec(collect.command, timeout=collect.timeout_s)
        return
    argv = ["sh", "-c", collect.command]
    with contextlib.suppress(NotFound, RetryHere):
        await sandbox.sidecar_exec(
            collect.service, argv, user=collect.user, timeout_s=collect.timeout_s
        )


async def _artifacts(job: Job, sandbox: Sandbox) -> tuple[bytes, str]:
    """The stored tar of the instance's artifacts, and why there is none. The tar of an earlier try
    stays."""
    if not job.instance.artifact_paths:
        return b"", ""
    output_mb = job.agent_sandbox.placement.limits.output_mb
    packed = await pack_artifacts(sandbox, job.instance.artifacts, output_mb=output_mb)
    for name, paths in job.instance.sidecar_artifacts.items():
        left_mb = output_mb - (len(packed.data) >> 20)
        more = await pack_sidecar_artifacts(sandbox, name, paths, output_mb=left_mb)
        refused = packed.refused or more.refused
        packed = PackedArtifacts(b"" if refused else packed.data + more.data, refused)
    key, store = job.key(ARTIFACTS), job.services.store
    if packed.data and not await store.put_if_absent(key, packed.data):
        return (await store.get(key)).data, ""
    return packed.data, packed.refused


async def _captured(
    job: Job, sandbox: Sandbox, base_git: str | None, forced: str = ""
) -> diff.CapturedPatch:
    """Take the diff. An agent may leave a tree of which none can be taken. That is a verdict only
    if every capture is refused and a control in a new sandbox succeeds.

    Raises: RetryHere or SandboxLost if the control fails.
    """
    plan, most = job.agent_sandbox, job.services.settings.diff_max_bytes
    for _ in range(REFUSALS):
        captured = await diff.capture(sandbox, base_git, max_bytes=most, forced=forced)
        if not captured.refused:
            return captured
        if not plan.admission.metered and not await sandboxes_work(job):
            raise RetryHere(
                f"no diff can be taken, not even of a pristine tree: {captured.refused}",
                retry_after=HOST_PAUSE_S,
                boundary=Boundary.SANDBOX,
            )
    if plan.admission.metered:
        # The account may allow no second sandbox, so the control takes the agent sandbox's slot.
        await plan.provider.kill(sandbox.identity)
        if not await sandboxes_work(job):
            raise SandboxLost(
                f"no diff can be taken, and the control fails too: {captured.refused}"
            )
    return captured


def _given(patch: str, max_bytes: int) -> diff.CapturedPatch:
    """The patch that the handler's own agent returned."""
    data = patch.encode("utf-8", "surrogateescape")
    files = sum(line.startswith(b"diff --git ") for line in data.splitlines())
    if len(data) > max_bytes:
        return diff.CapturedPatch(b"", files, too_large=True)
    return diff.CapturedPatch(data, files)


async def _hand_over(job: Job, patch: PatchRef) -> str:
    """Pass the agent's permit to the grading or release it. Returns the step to await, if any."""
    agents, gradings = job.agent_sandbox.admission, job.grade_sandbox.admission
    if not (agents.metered or gradings.metered):
        return ""
    needed = gradings.metered and job.request.grades_now and await _will_be_tested(job, patch)
    if not needed or gradings.account != agents.account:
        await agents.release()
    if not needed:
        return ""
    await gradings.ask(job.grade_step)
    return job.grade_step


async def _will_be_tested(job: Job, patch: PatchRef) -> bool:
    run = await job.read("agent.json", AgentRun)
    return run is not None and not run.broke and needs_tests(job, patch)
