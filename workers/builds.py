"""Which build this worker runs: what Temporal pins open rollouts to (docs/upgrade.md)."""

import structlog
from temporalio.api.workflowservice.v1 import DescribeWorkerDeploymentRequest
from temporalio.client import Client
from temporalio.common import WorkerDeploymentVersion
from temporalio.service import RPCError
from temporalio.worker import WorkerDeploymentConfig

from perdure.settings.tree import DeploymentSettings

log = structlog.get_logger("perdure.worker")


def build_of(settings: DeploymentSettings) -> WorkerDeploymentConfig | None:
    """None: no build is named, so any worker takes any rollout."""
    if not settings.build_id:
        return None
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(settings.name, settings.build_id),
        use_worker_versioning=True,
    )


async def say_if_not_current(client: Client, settings: DeploymentSettings) -> None:
    """A build begins nothing before an operator makes it current, and nothing else would say so."""
    request = DescribeWorkerDeploymentRequest(
        namespace=client.namespace, deployment_name=settings.name
    )
    current = ""
    try:
        answer = await client.workflow_service.describe_worker_deployment(request)
        info = answer.worker_deployment_info
        current = info.routing_config.current_deployment_version.build_id
    except RPCError as error:  # the server does not know the deployment yet
        log.debug("the deployment cannot be described", reason=str(error))
    if current != settings.build_id:
        log.warning(
            "new rollouts do not begin on this build until it is made current",
            build=settings.build_id,
            current=current or "none",
            fix="temporal worker deployment set-current-version"
            f" --deployment-name {settings.name} --build-id {settings.build_id}",
        )
