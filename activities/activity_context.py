"""What a stage may ask Temporal: about the current try of its activity, and about workflows."""

import time
from typing import Literal

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.heartbeats import report
from perdure.client import temporal_names
from perdure.rollouts.admission.permit_rules import AskPermit, CreateRefused
from perdure.sandboxes.sandbox_reaper import Owner


async def signal_account(
    account: str,
    signal: Literal["ask", "started", "refused", "release"],
    message: AskPermit | CreateRefused | str,
) -> None:
    client, workflow_id = activity.client(), temporal_names.account_id(account)
    if signal == "ask":
        await client.start_workflow(
            temporal_names.ACCOUNT,
            id=workflow_id,
            task_queue=temporal_names.WORKFLOWS_QUEUE,
            start_signal=signal,
            start_signal_args=[message],
            static_summary=f"permits of {account}",
        )
        return
    try:
        await client.get_workflow_handle(workflow_id).signal(signal, message)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:  # a closed account keeps no permits
            raise


class RunningActivityAttempt:
    """Implements `perdure.rollouts.attempt_job.ActivityAttempt` for the running activity."""

    signal_account = staticmethod(signal_account)

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def number(self) -> int:
        return activity.info().attempt

    @property
    def play(self) -> str:
        return activity.info().workflow_run_id or ""

    def now(self) -> float:
        started: float = activity.info().started_time.timestamp()
        return started + time.monotonic() - self._began

    def is_cancelled_on_purpose(self) -> bool:
        details = activity.cancellation_details()
        return details is not None and details.cancel_requested

    def is_superseded(self) -> bool:
        details = activity.cancellation_details()
        return details is not None and not (details.cancel_requested or details.worker_shutdown)

    async def workflow_may_be_open(self) -> bool:
        try:
            fate = await fetch_owner_state(activity.client(), activity.info().workflow_id or "")
        except RPCError:
            return True  # if it is closed, the reaper finds out later
        return fate is Owner.ALIVE

    def report(self, **progress: object) -> None:
        report(**progress)


async def fetch_owner_state(client: Client, workflow_id: str) -> Owner:
    """Whether the workflow is open. Asks the server itself, because the visibility store lags."""
    try:
        described = await client.get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return Owner.UNKNOWN
        raise
    running = described.status is WorkflowExecutionStatus.RUNNING
    return Owner.ALIVE if running else Owner.ENDED
