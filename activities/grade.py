"""grade_in_fresh_sandbox: the hidden tests, in sandbox B, which nobody has touched."""

import time

from activities import checkpoints, making
from activities.admission import Admission
from activities.messages import Attempt, GradedPatch
from activities.services import Services
from activities.shell import shell
from perdure.errors import Boundary, GiveUp, NotFound, RetryHere, SandboxLost
from perdure.graders.base import Graded
from perdure.sandboxes import phases
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.phases import Place
from perdure.storage import keys
from perdure.types import Grade, Instance, Outcome, PatchRef, Rewards, RolloutRequest

MAX_LOST = 3
"""Grading sandboxes that may be lost: tests that take their sandbox down do so every time."""


class GradingSandboxesLost(GiveUp):
    """Every sandbox of this grading was lost: the rollout ends as failed, without a reward."""

    boundary = Boundary.SANDBOX


class GradeInFreshSandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("grade_in_fresh_sandbox")
    async def grade(self, attempt: Attempt) -> GradedPatch:
        folder = keys.attempt(attempt.request, attempt.attempt)
        key = grade_key(attempt)
        found = await checkpoints.read(self.services.store, key, Grade)
        if found is None:
            patch = await checkpoints.read(self.services.store, f"{folder}/patch.json", PatchRef)
            if patch is None:
                raise NotFound(f"no captured patch at {folder}/patch.json")
            found = await checkpoints.write(
                self.services.store, key, await self._verdict(attempt, patch, folder)
            )
        place = await self.services.place(attempt.request, "grade")
        await Admission(self.services, place.provider, attempt.request).release()
        return GradedPatch(
            outcome=found.outcome,
            reward=found.reward,
            seconds=round(found.seconds, 3),
            reason=found.reason[:200],
        )

    async def _verdict(self, attempt: Attempt, patch: PatchRef, folder: str) -> Grade:
        if not needs_tests(self.services, attempt.request, patch):
            if patch.too_large:
                return _without_tests(patch, Outcome.APPLY_FAILED, "patch_too_large")
            return _without_tests(patch, Outcome.EMPTY_PATCH, "the agent changed nothing")
        data = (await self.services.store.get(patch.key)).data
        instance = await self.services.instance(attempt.request)
        started = time.monotonic()
        graded = await self._run_tests(attempt, instance, data)
        log_key = f"{folder}/tests-{_generation(attempt)}.log"
        await self.services.store.put_if_absent(log_key, graded.log)
        if graded.junit is not None:
            junit_key = log_key.removesuffix(".log") + ".xml"
            await self.services.store.put_if_absent(junit_key, graded.junit)
        return graded.grade.model_copy(
            update={
                "log_key": log_key,
                "patch_sha256": patch.sha256,
                "seconds": time.monotonic() - started,
            }
        )

    async def _run_tests(self, attempt: Attempt, instance: Instance, patch: bytes) -> Graded:
        request = attempt.request
        place = phases.place(request, instance, "grade")
        provider = self.services.provider(place.provider)
        identity = self.services.grade_identity(request, attempt.attempt)
        timeout_s = request.grade_timeout_s or instance.grading.timeout_s
        try:
            await provider.kill(identity)  # a half-used one of an earlier try is not fresh
            spec = await self._spec(attempt, instance, place, timeout_s)
            admission = Admission(self.services, place.provider, request)
            async with admission.starting():
                sandbox = await making.make(provider, spec, identity)
            async with making.ending(sandbox):
                await admission.started()
                grader = self.services.grader(instance.grading.protocol)
                return await grader.grade(sandbox, instance, patch, timeout_s=timeout_s)
        except SandboxLost as error:
            raise await self._lost(attempt, error) from error

    async def _lost(self, attempt: Attempt, error: SandboxLost) -> RetryHere | GradingSandboxesLost:
        """Counted in the store: Temporal's own count also holds workers that were told to stop."""
        store, prefix = self.services.store, grade_key(attempt).removesuffix(".json") + "-lost-"
        number = 1 + len([key async for key in store.list(prefix)])
        await store.put_if_absent(f"{prefix}{number}.txt", f"{error}\n".encode())
        if number < MAX_LOST:
            return RetryHere(f"the grading sandbox was lost: {error}", boundary=Boundary.SANDBOX)
        return GradingSandboxesLost(f"{number} grading sandboxes were lost, the last one: {error}")

    async def _spec(
        self, attempt: Attempt, instance: Instance, place: Place, timeout_s: float
    ) -> SandboxSpec:
        prepared = await self.services.prepared(attempt.request, instance, "grade")
        return SandboxSpec(
            workdir=prepared.workdir,
            tree=prepared.tree,
            image=prepared.image,
            mounts=prepared.mounts,
            env=prepared.env,
            limits=place.limits,
            network=place.network,
            labels=self.services.labels(attempt.request, attempt.attempt, "grade"),
            ttl_s=max(self.services.settings.sandbox.ttl_s, timeout_s + 600),
        )


def needs_tests(services: Services, request: RolloutRequest, patch: PatchRef) -> bool:
    """Whether a sandbox is booted for the verdict at all."""
    if patch.too_large or not patch.empty:
        return not patch.too_large
    if request.grade_empty_patch is not None:
        return request.grade_empty_patch
    return bool(getattr(services.agent(request.agent), "grade_empty_patch", False))


def _generation(attempt: Attempt) -> str:
    """Differs after a reset, so that a reset workflow grades again.

    The end of the run id: its beginning is the time, and equal for a minute.
    """
    return attempt.workflow_run_id[-8:] or "0"


def grade_key(attempt: Attempt) -> str:
    folder = keys.attempt(attempt.request, attempt.attempt)
    return f"{folder}/grade-{_generation(attempt)}.json"


def _without_tests(patch: PatchRef, outcome: Outcome, reason: str) -> Grade:
    return Grade(
        outcome=outcome, reason=reason, rewards=Rewards(binary=0.0), patch_sha256=patch.sha256
    )
