"""The build that this worker runs, to which Temporal pins open rollouts (docs/upgrade.md)."""

from dataclasses import replace

import structlog
from temporalio.api.workflowservice.v1 import DescribeWorkerDeploymentRequest
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.service import RPCError
from temporalio.worker import (
    UnsandboxedWorkflowRunner,
    WorkerDeploymentConfig,
    WorkflowInstance,
    WorkflowInstanceDetails,
)

from perdure.client import temporal_names
from perdure.settings.settings_tree import DeploymentSettings

PINNED = (temporal_names.ROLLOUT, temporal_names.GROUP)
"""Workflows that stay on the build that started them. They end within hours."""
AUTO_UPGRADE_WORKFLOWS = (
    *(
        temporal_names.RUN,
        temporal_names.SHARD,
        temporal_names.REAPER,
        temporal_names.ACCOUNT,
        temporal_names.HOST,
    ),
    temporal_names.CALIBRATION,
)
"""Workflows that move to the current build. They run for days and start the next rollouts."""

log = structlog.get_logger("perdure.worker")


def build_of(settings: DeploymentSettings) -> WorkerDeploymentConfig | None:
    """None if no build is named. Then any worker takes any rollout."""
    if not settings.build_id:
        return None
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(settings.name, settings.build_id),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )


class MovingRunner(UnsandboxedWorkflowRunner):
    """Declares each workflow in `AUTO_UPGRADE_WORKFLOWS` as AUTO_UPGRADE. `workflow.defn` cannot do that: a worker
    without a build would declare it too, and the server would refuse all its workflow task
    completions.
    """

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        if det.info.workflow_type in AUTO_UPGRADE_WORKFLOWS:
            moves = replace(det.defn, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
            det = replace(det, defn=moves)
        return super().create_instance(det)


async def warn_if_not_current(client: Client, settings: DeploymentSettings) -> None:
    """Warn that a build gets no work before an operator makes it current. Nothing else says so."""
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
            "this build gets no new rollouts until it is made current",
            build=settings.build_id,
            current=current or "none",
            fix="temporal worker deployment set-current-version"
            f" --deployment-name {settings.name} --build-id {settings.build_id}",
        )
