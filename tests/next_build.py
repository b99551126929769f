"""`python -m tests.next_build`: a worker of a later build, whose rollouts have one more activity, and
whose grader answers with other fields. Neither build can read the other's verdict."""

import functools
from dataclasses import replace
from typing import Any

from temporalio import workflow

from activities.activity_decorator import shell
from activities.rollout_activities import Stages
from perdure.client import temporal_names
from perdure.rollouts.activity_messages import Attempt, GradedPatch
from perdure.rollouts.stage_services import Services
from perdure.types import EpisodeRef, Frozen, Outcome
from workers import task_queue_slots, workflow_worker
from workers.worker_process import main
from workflows import activity_options
from workflows.rollout_workflow import RolloutWorkflow


class Verdict(Frozen):
    """What `GradedPatch` has become: `score` is required, and there is no `reward`."""

    outcome: Outcome
    score: float | None
    reason: str = ""

    @property
    def reward(self) -> float | None:
        return self.score

    @classmethod
    def of(cls, graded: GradedPatch) -> "Verdict":
        return cls(outcome=graded.outcome, score=graded.reward, reason=graded.reason)


@workflow.defn(name=temporal_names.ROLLOUT)
class NextRollout(RolloutWorkflow):
    @workflow.run
    async def run(self, request: Any = None) -> EpisodeRef:
        return await super().run(request)

    async def _grade(self, attempt: Attempt, timeout_s: float, *, informs: bool = False) -> Any:
        options: dict[str, Any] = {**activity_options.grade(attempt.request, timeout_s)}
        await self._do("review_patch", attempt, type(None), options)
        attempt = attempt.model_copy(update={"workflow_run_id": workflow.info().run_id})
        return await self._do("grade_in_fresh_sandbox", attempt, Verdict, options)


WORKFLOWS = [NextRollout if one is RolloutWorkflow else one for one in workflow_worker.WORKFLOWS]


class NextGrading(Stages):
    @shell("grade_in_fresh_sandbox")
    async def grade(self, attempt: Attempt) -> Any:
        return Verdict.of(await super().grade(attempt))

    @shell("review_patch")
    async def review(self, attempt: Attempt) -> None:
        """Nothing: that it is there is the change."""


def next_queues(role: str, services: Services) -> list[task_queue_slots.Queue]:
    found = _queues(role, services)
    if role != "grade":
        return found
    grading = NextGrading(services)
    return [replace(one, activities=[grading.grade, grading.review]) for one in found]


_queues = task_queue_slots.queues


if __name__ == "__main__":
    task_queue_slots.queues = next_queues
    workflow_worker.workflow_worker = functools.partial(
        workflow_worker.workflow_worker, workflows=WORKFLOWS
    )
    main()
