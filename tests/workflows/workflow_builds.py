"""Two builds of Perdure on one server: each has its own workflow code and its own messages."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.enums.v1 import WorkerDeploymentVersionStatus as STATUS
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    DescribeWorkerDeploymentRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client import temporal_names
from perdure.rollouts.activity_messages import Attempt, Booted, Captured, GradedPatch
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import DeploymentSettings, Settings
from perdure.types import Outcome
from tests import next_build as next_build_worker
from tests.next_build import Verdict
from tests.stack.wait_until import until
from tests.workflows.scripted_stages import Stages
from workers import task_queue_slots
from workers.deployment_version import build_of
from workers.worker_process import ROLES
from workers.workflow_worker import WORKFLOWS, workflow_worker

STATUS_PREFIX = "WORKER_DEPLOYMENT_VERSION_STATUS"
DEPLOYMENT = DeploymentSettings()
ROUTED = (
    (temporal_names.WORKFLOWS_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
    (temporal_names.BOOT_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    (temporal_names.GRADE_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    (temporal_names.IO_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
)
"""Queues whose tasks go to a build."""


class NextStages(Stages):
    @activity.defn(name="review_patch")
    async def review(self, attempt: Attempt) -> None:
        await self._do("review_patch", attempt, None)

    def activities(self) -> list[Any]:
        return [*super().activities(), self.review]


@dataclass
class Build:
    """The worker of one build, and which stages of which rollouts it ran."""

    id: str
    stages: Stages
    workflows: Sequence[type] = WORKFLOWS
    done: list[tuple[str, str]] = field(default_factory=list)
    """Stage, and run id of the rollout."""

    @asynccontextmanager
    async def at_work(self, client: Client, home: Path) -> AsyncIterator[None]:
        """Polls what `python -m workers` polls, with the same versions."""
        # One connection takes one worker of a queue and build; two processes have two.
        client = await Client.connect(
            client.service_client.config.target_host,
            namespace=client.namespace,
            data_converter=client.data_converter,
        )
        build = build_of(DEPLOYMENT.model_copy(update={"build_id": self.id}))
        services = Services(Settings(home=home))
        self._note(services.host)
        async with AsyncExitStack() as workers:
            for role in ROLES[1:]:
                for queue in task_queue_slots.queues(role, services):
                    ours = replace(queue, activities=self.stages.activities(), slots=20)
                    worker = task_queue_slots.activity_worker(client, ours, build)
                    await workers.enter_async_context(worker)
            await workers.enter_async_context(
                workflow_worker(client, build=build, workflows=self.workflows)
            )
            yield

    def _note(self, host: str) -> None:
        """Records who ran what; a stage that a test overrides records it itself."""

        def noted(stage: str, result: Any) -> Callable[[Attempt], Awaitable[Any]]:
            async def run(attempt: Attempt) -> Any:
                self.done.append((stage, attempt.request.run_id))
                return result

            return run

        graded = GradedPatch(outcome=Outcome.RESOLVED, reward=1.0)
        results: dict[str, Any] = {
            "boot_sandbox": Booted(uri="file:///x", attempt=1, host=host),
            "capture_diff": Captured(size=10, files=1, empty=False),
            "review_patch": None,
            "grade_in_fresh_sandbox": Verdict.of(graded) if self.changed else graded,
        }
        for stage, result in results.items():
            self.stages.override.setdefault(stage, noted(stage, result))

    @property
    def changed(self) -> bool:
        return isinstance(self.stages, NextStages)


def next_build(build_id: str) -> Build:
    return Build(build_id, NextStages(), next_build_worker.WORKFLOWS)


async def make_current(client: Client, build_id: str) -> None:
    """Like `temporal worker deployment set-current-version`, once all queues are known."""

    async def made() -> bool:
        try:
            await client.workflow_service.set_worker_deployment_current_version(
                SetWorkerDeploymentCurrentVersionRequest(
                    namespace=client.namespace,
                    deployment_name=DEPLOYMENT.name,
                    build_id=build_id,
                )
            )
        except RPCError:
            return False
        return True

    async def routed() -> bool:
        """Wait until all queues know the version: the server tells each queue a moment later."""
        for queue, kind in ROUTED:
            answer = await client.workflow_service.describe_task_queue(
                DescribeTaskQueueRequest(
                    namespace=client.namespace,
                    task_queue=TaskQueue(name=queue),
                    task_queue_type=kind,
                )
            )
            if answer.versioning_info.current_deployment_version.build_id != build_id:
                return False
        return True

    await until(made, f"{build_id} is current")
    await until(routed, f"every queue routes to {build_id}")


async def statuses(client: Client) -> dict[str, str]:
    """Build id -> `CURRENT`, `DRAINING`, `DRAINED` or the like."""
    answer = await client.workflow_service.describe_worker_deployment(
        DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=DEPLOYMENT.name)
    )
    return {
        one.deployment_version.build_id: STATUS.Name(one.status).removeprefix(f"{STATUS_PREFIX}_")
        for one in answer.worker_deployment_info.version_summaries
    }
