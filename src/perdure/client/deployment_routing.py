"""Which build Temporal routes new work to, and whether workers of that build are polling."""

import contextlib

from temporalio.api.enums.v1 import TaskQueueType, WorkerDeploymentVersionStatus
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    DescribeTaskQueueResponse,
    DescribeWorkerDeploymentRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client import temporal_names
from perdure.settings.settings_tree import DeploymentSettings

Build = tuple[str, str]
"""Name of a deployment, and build id."""
NO_BUILD = ("", "")
PINNED_TO = (
    "ExecutionStatus = 'Running' AND TemporalWorkflowVersioningBehavior = 'Pinned'"
    " AND TemporalWorkerDeploymentVersion = "
)
IDLE_VERSION_STATUSES = {
    WorkerDeploymentVersionStatus.WORKER_DEPLOYMENT_VERSION_STATUS_INACTIVE,
    WorkerDeploymentVersionStatus.WORKER_DEPLOYMENT_VERSION_STATUS_DRAINED,
}
"""Statuses of a build that has no open workflow."""
MOVE = "temporal workflow update-options --versioning-override-behavior auto_upgrade"
SET_CURRENT = "temporal worker deployment set-current-version --deployment-name"


async def explain_own_build_routing(client: Client, settings: DeploymentSettings) -> str:
    """Like `explain_build_routing`, for the workers that these settings would start. Also names open
    rollouts that only another build continues. Raises: RPCError."""
    ours = (settings.name, settings.build_id) if settings.build_id else NO_BUILD
    routed = trouble(_current(await _described(client)), {ours})
    left = []
    with contextlib.suppress(RPCError):  # no deployment, or a server without worker versioning
        left = await _left_to_others(client, settings)
    return "; ".join(filter(None, [routed, *left]))


async def _left_to_others(client: Client, settings: DeploymentSettings) -> list[str]:
    """One sentence for each other build that has open rollouts or groups."""
    answer = await client.workflow_service.describe_worker_deployment(
        DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=settings.name)
    )
    told = []
    for one in answer.worker_deployment_info.version_summaries:
        build = one.deployment_version.build_id
        if one.status in IDLE_VERSION_STATUSES or build == settings.build_id:
            continue
        query = f"{PINNED_TO}'{settings.name}:{build}'"
        if count := (await client.count_workflows(query)).count:
            told.append(
                f"open rollouts that need build {build}: {count}; start its workers with"
                f" PERDURE_DEPLOYMENT__BUILD_ID={build}, or, if this build can replay them, move them"
                f' with `{MOVE} --query "{query}"`'
            )
    return told


async def explain_build_routing(client: Client) -> str:
    """Why no worker takes new work because of its build id, and the fix; empty if a worker does, or
    if there are no workers. Raises: RPCError."""
    answer = await _described(client)
    workers = {
        (poller.deployment_options.deployment_name, poller.deployment_options.build_id)
        if poller.deployment_options.build_id
        else NO_BUILD
        for poller in answer.pollers
    }
    return trouble(_current(answer), workers)


async def _described(client: Client) -> DescribeTaskQueueResponse:
    return await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=temporal_names.WORKFLOWS_QUEUE),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
    )


def _current(answer: DescribeTaskQueueResponse) -> Build:
    current = answer.versioning_info.current_deployment_version
    return (current.deployment_name, current.build_id) if current.build_id else NO_BUILD


def trouble(current: Build, workers: set[Build]) -> str:
    if not workers or current in workers:
        return ""
    deployment, build = sorted(workers)[-1]
    if build:
        fix = f"`{SET_CURRENT} {deployment} --build-id {build}` sends it to these workers"
    else:
        fix = f"`{SET_CURRENT} {current[0]} --unversioned` sends it to these workers"
    have = f"build {build}" if build else "no build id"
    wanted = f"build {current[1]}" if current[1] else "workers without a build id"
    return f"new work goes to {wanted}, but the workers here have {have}: {fix}"
