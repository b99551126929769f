"""Which build Temporal sends new work to, and whether workers of that build are there."""

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest, DescribeTaskQueueResponse
from temporalio.client import Client

from perdure.client import names
from perdure.settings.tree import DeploymentSettings

Build = tuple[str, str]
"""Name of a deployment, and build id."""
NO_BUILD = ("", "")
SET_CURRENT = "temporal worker deployment set-current-version --deployment-name"


async def own_build_trouble(client: Client, settings: DeploymentSettings) -> str:
    """As `build_trouble`, for the workers that these settings would start. Raises: RPCError."""
    ours = (settings.name, settings.build_id) if settings.build_id else NO_BUILD
    return trouble(_current(await _described(client)), {ours})


async def build_trouble(client: Client) -> str:
    """Why no worker takes new work because of its build id, and what to do; empty: one does, or no worker is
    there at all. Raises: RPCError."""
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
            task_queue=TaskQueue(name=names.WORKFLOWS_QUEUE),
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
