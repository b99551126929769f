"""The worker of the workflow queue: decides, does no I/O, imports no provider.

Production runs workflow code as it is; tests and replays run it in the SDK's sandbox, which refuses
what is not deterministic (docs/decisions/0007-what-a-rollout-costs.md).
"""

from collections.abc import Sequence
from datetime import timedelta

from temporalio.client import Client
from temporalio.worker import (
    Interceptor,
    PollerBehaviorAutoscaling,
    UnsandboxedWorkflowRunner,
    Worker,
    WorkerDeploymentConfig,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from perdure.client import names
from workers.builds import MovingRunner
from workflows.account import SandboxAccountWorkflow
from workflows.calibration import CalibrationWorkflow
from workflows.group import RolloutGroupWorkflow
from workflows.host import HostWorkflow
from workflows.reaper import ReaperWorkflow
from workflows.rollout import RolloutWorkflow
from workflows.run import RunShardWorkflow, RunWorkflow
from workflows.signals import CheckedSignals
from workflows.web_ui import VIEWER

WORKFLOWS: Sequence[type] = (
    RolloutWorkflow,
    RolloutGroupWorkflow,
    RunWorkflow,
    RunShardWorkflow,
    ReaperWorkflow,
    SandboxAccountWorkflow,
    HostWorkflow,
    CalibrationWorkflow,
)

CACHED = 800
"""Workflows kept as they are between two of their tasks, at some 60 KB each. One that waits longer than
so many others, as for its agent, is replayed at its next task, which takes milliseconds."""

PASSTHROUGH = (
    "perdure",
    "activities",
    "workflows",
    "pydantic_settings",
    "structlog",
    "opentelemetry",
)


def checking_runner() -> SandboxedWorkflowRunner:
    """Fails a workflow that reads clocks, files or the network."""
    restrictions = SandboxRestrictions.default.with_passthrough_modules(*PASSTHROUGH)
    return SandboxedWorkflowRunner(restrictions=restrictions)


class _AroundWorkflows(Interceptor):
    """Tells workflows a fact of their worker: details do not enter history, so it may change. Checks their
    signals."""

    def __init__(self, viewer_url: str) -> None:
        self._url = viewer_url

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        if self._url:
            input.unsafe_extern_functions[VIEWER] = lambda: self._url
        return CheckedSignals


def workflow_worker(
    client: Client,
    runner: WorkflowRunner | None = None,
    build: WorkerDeploymentConfig | None = None,
    workflows: Sequence[type] = WORKFLOWS,
    viewer_url: str = "",
) -> Worker:
    """`runner`: None is production's, without checks. `build`: None is no versioning. `viewer_url`: of
    `perdure view`, for links in details."""
    return Worker(
        client,
        task_queue=names.WORKFLOWS_QUEUE,
        workflows=workflows,
        deployment_config=build,
        workflow_runner=runner or (MovingRunner() if build else UnsandboxedWorkflowRunner()),
        interceptors=[_AroundWorkflows(viewer_url)],
        max_cached_workflows=CACHED,
        # How long a task waits for the worker that cached its workflow, before any other may take it.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=5),
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(minimum=2, initial=4, maximum=16),
    )
