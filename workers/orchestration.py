"""The worker of the workflow queue: decides, does no I/O, imports no provider."""

from collections.abc import Sequence
from datetime import timedelta

from temporalio.client import Client
from temporalio.worker import PollerBehaviorAutoscaling, Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from perdure.client import names
from workflows.group import RolloutGroupWorkflow
from workflows.reaper import ReaperWorkflow
from workflows.rollout import RolloutWorkflow
from workflows.run import RunShardWorkflow, RunWorkflow

WORKFLOWS: Sequence[type] = (
    RolloutWorkflow,
    RolloutGroupWorkflow,
    RunWorkflow,
    RunShardWorkflow,
    ReaperWorkflow,
)

PASSTHROUGH = ("perdure", "activities", "workflows", "pydantic_settings", "structlog")


def workflow_runner() -> SandboxedWorkflowRunner:
    restrictions = SandboxRestrictions.default.with_passthrough_modules(*PASSTHROUGH)
    return SandboxedWorkflowRunner(restrictions=restrictions)


def workflow_worker(client: Client) -> Worker:
    return Worker(
        client,
        task_queue=names.WORKFLOWS_QUEUE,
        workflows=WORKFLOWS,
        workflow_runner=workflow_runner(),
        max_cached_workflows=2000,
        # How long a decision waits for a worker that was killed, before any other may take it.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=5),
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(minimum=2, initial=4, maximum=16),
    )
