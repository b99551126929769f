"""The grade stage: run the hidden tests in a fresh sandbox that no agent has touched, and ask the request's
reward model."""

import contextlib
import hashlib
import time
from dataclasses import replace
from typing import Any

from perdure import retry, tracing
from perdure.agents.oracle import Oracle
from perdure.data_source_handlers import JobDetails, parse_verdict, wrap_hook_call
from perdure.engines.quota_resets import QuotaReset
from perdure.errors import (
    AccountExhausted,
    AttemptDamaged,
    Boundary,
    GiveUp,
    NotFound,
    RateLimited,
    RetryHere,
    SandboxLost,
)
from perdure.graders.artifact_transfer import outside_artifacts, unpack_artifacts
from perdure.graders.base import Graded
from perdure.graders.diff.signal_search import signals_of
from perdure.graders.hidden_test_run import LostDuringTests, SilentDuringTests
from perdure.graders.image.image_setup import set_up_image, with_committed_tests
from perdure.graders.protocols.reward_file import tests_instance
from perdure.graders.reward_rules import apply_reward_rules
from perdure.graders.twins.paired_runs import verified
from perdure.graders.twins.twin_verdict import follow_official_verdict
from perdure.graders.verdict_rules import failing
from perdure.limited_process import Unparsable, read
from perdure.rollouts import handler_hooks
from perdure.rollouts.activity_messages import GradedPatch
from perdure.rollouts.admission import account_resets
from perdure.rollouts.admission.permit_rules import PAUSE_S
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import init_metadata
from perdure.rollouts.calibration.calibration_stages import with_calibration
from perdure.rollouts.in_place_grading import in_place_result
from perdure.rollouts.reward_model.scoring import scored
from perdure.rollouts.sandbox.allowed_network import allowed_network, check_row_hosts
from perdure.rollouts.sandbox.sandbox_creation import create_sandbox, kill_on_exit
from perdure.rollouts.simulated_user.turn_grading import captured_turns, with_turn_grades
from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.types import Grade, Instance, Outcome, PatchRef, Rewards

MAX_LOST = 3
"""Lost grading sandboxes after which grading stops, because some tests always end their sandbox."""
TOLD_TESTS, TOLD_CHARACTERS = 5, 160
"""Failing tests reported to the workflow, and characters of each. The grade lists all of them."""
ARTIFACTS = "artifacts.tar"
"""File of an attempt: what the agent left at the paths of `Instance.artifacts`."""
TESTS_CAUSED_LOSS_SUFFIX = "-by-the-tests.txt"
"""Suffix of the key that records a loss caused by the code under test."""


class GradingSandboxesLost(GiveUp):
    """The sandboxes of this grading were lost, and the code under test may not be the cause. The
    rollout ends as failed, without a reward."""

    boundary = Boundary.SANDBOX


async def grade(job: Job) -> GradedPatch:
    """Without an outcome if the sandboxes' account is closed. The grading keeps its permit.

    Raises: NotFound if no diff was captured; AttemptDamaged; RetryHere; GradingSandboxesLost.
    """
    if (reset := await account_resets.reset_before_grading(job)) is not None:
        return _parked(reset)
    try:
        found = await job.once(checkpoint(job.workflow_run_id), Grade, _grade_all)
    except AccountExhausted as error:
        return _parked(await account_resets.note_exhausted(job, job.grade_sandbox, error))
    await job.grade_sandbox.admission.release()
    resolved = found.outcome is Outcome.RESOLVED
    failed = [] if resolved else failing(found.fail_to_pass, found.pass_to_pass)
    return GradedPatch(
        stored_as=checkpoint(job.workflow_run_id),
        outcome=found.outcome,
        reward=found.reward,
        seconds=round(found.seconds, 3),
        reason=(found.withheld or found.reason)[:200],
        failing=tuple(test[:TOLD_CHARACTERS] for test in failed[:TOLD_TESTS]),
        failing_count=len(failed),
    )


def _parked(reset: QuotaReset) -> GradedPatch:
    return GradedPatch(outcome=None, reward=None, reason=reset.reason, resets_at=reset.resets_at)


def checkpoint(workflow_run_id: str) -> str:
    return f"grade-{_generation(workflow_run_id)}.json"


def needs_tests(job: Job, patch: PatchRef) -> bool:
    """Whether the verdict needs a sandbox."""
    model = job.request.reward_model
    return is_gradable(job, patch) and not (model is not None and model.replaces_tests)


def is_gradable(job: Job, patch: PatchRef) -> bool:
    """Whether there is work for tests or a reward model, so that the patch alone gives no verdict."""
    if patch.artifacts_refused:
        return False
    grading = job.instance.grading
    if (
        grading.in_place or grading.verifier is not None
    ):  # the tests do not depend on the diff alone
        return True
    if patch.refused or patch.too_large or patch.unapplied:
        return False
    if not patch.empty:
        return True
    if job.request.grade_empty_patch is not None:
        return job.request.grade_empty_patch
    return bool(job.instance.artifact_paths) or bool(getattr(job.agent, "grade_empty_patch", False))


def without_hidden_tests(instance: Instance) -> Instance:
    """The row with the base's own tests only."""
    none: dict[str, Any] = {
        "test_patch": b"",
        "files": {},
        "tests_from": None,
        "twin_draws": (),
        "canary": False,
    }
    return instance.model_copy(update={"grading": instance.grading.model_copy(update=none)})


def _generation(workflow_run_id: str) -> str:
    """Part of the run id that changes at a reset, so that a reset workflow grades again.

    It is the end of the id: the beginning is a timestamp, which stays equal for a minute.
    """
    return workflow_run_id[-8:] or "0"


async def _grade_all(job: Job) -> Grade:
    """Grade the patch, and the diff of each turn if `user.grade_turns` is set."""
    turns = await captured_turns(job)
    if not turns:
        return await _grade(job)
    name = _generation(job.workflow_run_id)
    grade = await job.once(f"final-grade-{name}.json", Grade, _grade)
    return await with_turn_grades(await with_calibration(job), grade, turns, name, _grade_turn)


async def _grade_turn(job: Job, patch: PatchRef, turn: int) -> Grade:
    if not is_gradable(job, patch):
        return _without_tests(job, patch)
    data = await _captured(job, patch.key, patch.sha256)
    return await _by_tests(job, patch, data, f"-turn-{turn}")


async def _grade(job: Job) -> Grade:
    patch = await job.read("patch.json", PatchRef)
    if patch is None:
        raise NotFound(f"no captured patch at {job.key('patch.json')}")
    job = await with_calibration(job)
    if not getattr(job.agent, "hidden_tests", True):
        job = replace(job, row=without_hidden_tests(job.instance))
    if not is_gradable(job, patch):
        return _without_tests(job, patch)
    data = await _captured(job, patch.key, patch.sha256)
    if job.request.reward_model is None:
        return await _by_tests(job, patch, data)
    name, tests = _generation(job.workflow_run_id), None
    if needs_tests(job, patch):

        async def by_tests(job: Job) -> Grade:
            return await _by_tests(job, patch, data)

        # A retry of the reward model's call must not run the tests again.
        tests = await job.once(f"tested-{name}.json", Grade, by_tests)
        await job.grade_sandbox.admission.release()
        if tests.outcome is Outcome.TAMPERED:
            return tests
    grade = await scored(job, data, tests, name)
    if tests is None:
        signals = await signals_of(data, job.instance, job.services.signal_rules)
        grade = grade.model_copy(update={"signals": signals, "patch_sha256": patch.sha256})
    return apply_reward_rules(grade, job.request)


async def _by_tests(job: Job, patch: PatchRef, data: bytes, suffix: str = "") -> Grade:
    """`suffix`: of the names of its files."""
    store = job.services.store
    artifacts = b""
    if patch.artifacts_sha256:
        artifacts = await _captured(job, job.key(ARTIFACTS), patch.artifacts_sha256)
    started = time.monotonic()
    identities = iter(job.grade_identities)

    async def graded_once(instance: Instance) -> Graded:
        return await _run_tests(job, data, instance, next(identities), artifacts)

    found = await verified(
        job.instance,
        job.request.twin_pairs,
        graded_once,
        at_once=not job.grade_sandbox.admission.metered,  # a permit is for one sandbox
        without=job.without_twin,
    )
    name = job.key(f"tests-{_generation(job.workflow_run_id)}{suffix}")
    for number, graded in enumerate(found.runs, 1):
        key = name if number == 1 else f"{name}-{number}"
        await store.put_if_absent(f"{key}.log", graded.log)
        if graded.junit is not None:
            await store.put_if_absent(f"{key}.xml", graded.junit)
    follows_official = job.request.verdict == "official"
    grade = follow_official_verdict(found.grade) if follows_official else found.grade
    grade = grade.model_copy(
        update={
            "signals": await signals_of(data, job.instance, job.services.signal_rules),
            "log_key": f"{name}.log",
            "calibration": job.calibration,
            "patch_sha256": patch.sha256,
            "seconds": time.monotonic() - started,
        }
    )
    return apply_reward_rules(grade, job.request)


async def _captured(job: Job, key: str, sha256: str) -> bytes:
    """What was captured. Raises: AttemptDamaged if it is gone or its bytes have changed."""
    try:
        data = (await job.services.store.get(key)).data
    except NotFound:
        problem = "is gone"
    else:
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        problem = "is not what was captured: its sha256 differs"
    raise AttemptDamaged(
        f"{key} {problem}; a new attempt replays the recorded turns, and an earlier verdict stays"
    )


async def _run_tests(
    job: Job, patch: bytes, instance: Instance, identity: str, artifacts: bytes
) -> Graded:
    """Run the tests once. If they end every sandbox, return that verdict.

    Raises: RetryHere, GradingSandboxesLost.
    """
    if instance.grading.in_place:
        return await in_place_result(job)
    try:
        is_first = identity == job.grade_identities[0]
        graded = await _run_once(
            job, patch, instance, identity, is_first=is_first, artifacts=artifacts
        )
    except SandboxLost as error:
        return await _after_loss(job, error, identity)
    if graded.grade.outcome is Outcome.UNPARSABLE and not await _sandboxes_work(job, identity):
        said = f"the test output cannot be parsed, and neither can the control's: {graded.grade.reason}"
        return await _after_loss(job, SandboxLost(said), identity)
    if graded.grade.outcome is Outcome.TIMEOUT and await _fix_times_out(job, identity):
        said = (
            "the tests exceed their time limit, and so does the control: the host may be too busy"
        )
        return await _after_loss(job, SandboxLost(said), identity)
    is_resolved = graded.grade.outcome is Outcome.RESOLVED
    if graded.unreached and not is_resolved and not await _fix_resolves(job, identity):
        said = f"the tests could not reach {', '.join(sorted(graded.unreached))}"
        return await _after_loss(job, SandboxLost(said), identity)
    return graded


async def _run_once(
    job: Job,
    patch: bytes,
    instance: Instance,
    identity: str,
    *,
    is_first: bool,
    artifacts: bytes = b"",
) -> Graded:
    """Run the tests in a fresh sandbox: on the diff and the artifacts, or only on the artifacts if
    the tests have an environment of their own. Raises: SandboxLost; RateLimited in the first run."""
    plan = job.grade_sandbox
    timeout_s = job.request.grade_timeout_s or instance.grading.timeout_s
    if (verifier := instance.grading.verifier) is not None:
        cwd = verifier.cwd or await plan.provider.image_workdir(verifier.environment.image or "")
        patch, instance = b"", tests_instance(instance, verifier, cwd or "/")
    # A sandbox that an earlier try has used is not fresh.
    await plan.provider.kill(identity)
    spec = await grading_spec(job, timeout_s, job.labels("grade"), instance)
    sandbox = await _created(job, spec, identity, is_first=is_first)
    async with (
        kill_on_exit(job.activity_attempt, sandbox),
        allowed_network(job, "grade", sandbox) as asked,
    ):
        await plan.admission.started()
        if spec.tree is None:  # the code under test could also search later commits for the fix
            instance = await with_committed_tests(sandbox, instance)
            await set_up_image(sandbox, instance)
        if artifacts:
            if bad := await unpack_artifacts(sandbox, instance.artifact_paths, artifacts):
                zero = Rewards(binary=0.0)
                return Graded(Grade(outcome=Outcome.APPLY_FAILED, reason=bad, rewards=zero), b"")
            with contextlib.suppress(Unparsable):  # the grader refuses it
                patch = await read(outside_artifacts, patch, spec.workdir, instance.artifact_paths)
        handler = job.services.handler(instance.data_source)
        details = JobDetails(
            job_id=job.request.workflow_id,
            instance=instance,
            runtime=sandbox,
            metadata=await init_metadata(job),
            run_results={"git_patch": patch, **(await handler_hooks.results_of(job) or {})},
            timeout_s=timeout_s,
        )
        skips = not (job.request.grade_empty_patch or instance.artifact_paths)
        with (
            tracing.span("run tests", {"perdure.handler": handler.name}),
            wrap_hook_call(handler, "eval", sandbox),
        ):
            answer = await handler.eval(details, sid=f"eval_{details.job_id}", allow_skip=skips)
        return parse_verdict(handler, answer)._replace(unreached=frozenset(asked.unreachable))


async def _created(job: Job, spec: SandboxSpec, identity: str, *, is_first: bool) -> Sandbox:
    """Create the sandbox. From the second run of a grading on, wait here when a metered account
    refuses: the grading holds a slot already, and a Temporal retry would lose the earlier runs."""
    plan = job.grade_sandbox

    async def create() -> Sandbox:
        async with plan.admission.starting():
            return await create_sandbox(job.activity_attempt, plan.provider, spec, identity)

    return await retry.retry_call(
        create,
        RateLimited,
        pauses=(PAUSE_S, PAUSE_S),
        passes=lambda error: not is_first and not isinstance(error, AccountExhausted),
    )


async def grading_spec(
    job: Job, timeout_s: float, labels: dict[str, str], instance: Instance | None = None
) -> SandboxSpec:
    """A fresh sandbox in which the tests run for at most `timeout_s`. `instance`: as for
    `Job.prepared`."""
    plan = job.grade_sandbox
    check_row_hosts(job, "grade")
    prepared = await job.prepared(plan, instance)
    return SandboxSpec(
        workdir=prepared.workdir,
        tree=prepared.tree,
        image=prepared.image,
        mounts=prepared.mounts,
        env=prepared.env,
        sidecars=prepared.sidecars,
        folders=prepared.folders,
        limits=plan.placement.limits,
        network=plan.placement.network,
        allowed_hosts=plan.placement.allowed_hosts,
        labels=labels,
        ttl_s=max(job.services.settings.sandbox.ttl_s, timeout_s + 600),
    )


async def _after_loss(job: Job, error: SandboxLost, identity: str) -> Graded:
    """Count losses in the store, because Temporal's count includes tries that a shutdown ended.

    Raises: RetryHere; GradingSandboxesLost if the infrastructure may have caused one of the losses.
    """
    is_theirs = isinstance(error, LostDuringTests) and await _sandboxes_work(job, identity)
    if isinstance(error, SilentDuringTests) and not is_theirs:
        raise RetryHere(f"the grading sandbox does not answer: {error}", boundary=Boundary.SANDBOX)
    store = job.services.store
    prefix = job.key(f"grade-{_generation(job.workflow_run_id)}-lost-")
    losses = [key async for key in store.list(prefix)]
    number = 1 + len(losses)
    losses.append(f"{prefix}{number}{TESTS_CAUSED_LOSS_SUFFIX if is_theirs else '.txt'}")
    await store.put_if_absent(losses[-1], f"{error}\n".encode())
    if number < MAX_LOST:
        raise RetryHere(f"the grading sandbox was lost: {error}", boundary=Boundary.SANDBOX)
    if not all(key.endswith(TESTS_CAUSED_LOSS_SUFFIX) for key in losses):
        raise GradingSandboxesLost(
            f"{number} grading sandboxes were lost; last error: {error}"
        ) from error
    reason = f"the tests ended {number} sandboxes, while the control succeeded; last error: {error}"
    rewards = Rewards(binary=0.0)
    return Graded(Grade(outcome=Outcome.SANDBOX_DESTROYED, reason=reason, rewards=rewards), log=b"")


async def _sandboxes_work(job: Job, identity: str) -> bool:
    """Whether the row's own fix (or its base, if it has none) gets the expected verdict in such a
    sandbox, so that neither sandboxes nor row caused the loss. Raises: RetryHere."""
    if job.instance.grading.verifier is not None:  # there is no fix in the form of artifacts
        return await _control(job, identity) is not None
    expected = Outcome.RESOLVED if job.instance.gold_patch else Outcome.UNRESOLVED
    return await _control(job, identity) is expected


async def _fix_times_out(job: Job, identity: str) -> bool:
    """Whether the row's own fix also exceeds the time limit now, or loses its sandbox. False if the
    row has none, and for the agent that applies it. Raises: RetryHere."""
    if not job.instance.gold_patch or job.request.agent == Oracle.name:
        return False
    return await _control(job, identity) in (Outcome.TIMEOUT, None)


async def _fix_resolves(job: Job, identity: str) -> bool:
    """Whether the row's own fix passes now. False if the row has none. Raises: RetryHere."""
    return bool(job.instance.gold_patch) and await _control(job, identity) is Outcome.RESOLVED


async def _control(job: Job, identity: str) -> Outcome | None:
    """The verdict on the row's own fix in such a sandbox; None if that is lost. Raises: RetryHere."""
    name = f"{identity}-control"
    try:
        graded = await _run_once(job, job.instance.gold_patch, job.instance, name, is_first=False)
    except (SandboxLost, GiveUp):
        return None
    return graded.grade.outcome


def _without_tests(job: Job, patch: PatchRef) -> Grade:
    outcome, reason = Outcome.EMPTY_PATCH, "the agent changed nothing"
    if patch.artifacts_refused:
        outcome, reason = Outcome.CAPTURE_FAILED, patch.artifacts_refused
    elif patch.refused:
        outcome, reason = Outcome.CAPTURE_FAILED, patch.refused
    elif patch.too_large:
        outcome, reason = Outcome.APPLY_FAILED, "patch_too_large"
    elif patch.unapplied:
        outcome, reason = Outcome.APPLY_FAILED, patch.unapplied
    return Grade(
        outcome=outcome,
        reason=reason,
        rewards=Rewards(binary=0.0),
        patch_sha256=patch.sha256,
        calibration=job.calibration,
    )
