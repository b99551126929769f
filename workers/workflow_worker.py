"""The worker of the workflow queue: it runs workflow code, does no I/O, imports no provider.

In production the workflow code runs unsandboxed. Tests and replays run it in the SDK's sandbox,
which refuses nondeterministic code (docs/decisions/0007-what-a-rollout-costs.md).
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

from perdure.client import temporal_names
from workers.deployment_version import MovingRunner
from workflows.account_workflow import SandboxAccountWorkflow
from workflows.calibration_workflow import CalibrationWorkflow
from workflows.group_workflow import RolloutGroupWorkflow
from workflows.host_workflow import HostWorkflow
from workflows.reaper_workflow import ReaperWorkflow
from workflows.rollout_workflow import RolloutWorkflow
from workflows.run_workflow import RunShardWorkflow, RunWorkflow
from workflows.signal_arguments import CheckedSignals
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
"""Workflows in the sticky cache, at about 60 KB each. An evicted workflow, such as one that waits
long for its agent, is replayed at its next task, which takes milliseconds."""

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
    """Tells workflows the viewer's address, and checks their signals. The address may differ
    between workers: it appears only in details, which do not enter the history."""

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
    """`runner`: if None, the production runner, without checks. `build`: if None, no versioning.
    `viewer_url`: the address of `perdure view`, for links in details."""
    return Worker(
        client,
        task_queue=temporal_names.WORKFLOWS_QUEUE,
        workflows=workflows,
        deployment_config=build,
        workflow_runner=runner or (MovingRunner() if build else UnsandboxedWorkflowRunner()),
        interceptors=[_AroundWorkflows(viewer_url)],
        max_cached_workflows=CACHED,
        # How long a task waits for the worker that has cached its workflow, before another takes
        # it.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=5),
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(minimum=2, initial=4, maximum=16),
    )
