"""Messages to the SandboxAccountWorkflows: `perdure.rollouts.sandbox.admission.Accounts` over Temporal."""

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.client import names
from perdure.rollouts.messages import AskPermit, CreateRefused


class TemporalAccounts:
    """From inside an activity."""

    async def ask(self, account: str, asked: AskPermit) -> None:
        await activity.client().start_workflow(
            names.ACCOUNT,
            id=names.account_id(account),
            task_queue=names.WORKFLOWS_QUEUE,
            start_signal="ask",
            start_signal_args=[asked],
            static_summary=f"permits of {account}",
        )

    async def started(self, account: str, holder: str) -> None:
        await _signal(activity.client(), account, "started", holder)

    async def refused(self, account: str, refused: CreateRefused) -> None:
        await _signal(activity.client(), account, "refused", refused)

    async def release(self, account: str, holder: str) -> None:
        await _signal(activity.client(), account, "release", holder)


async def _signal(client: Client, account: str, signal: str, argument: object) -> None:
    try:
        await client.get_workflow_handle(names.account_id(account)).signal(signal, argument)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:  # then it keeps no permits
            raise
