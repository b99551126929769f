"""Messages to the SandboxAccountWorkflows: `perdure.rollouts.sandbox.admission.Accounts` over Temporal."""

import asyncio

import structlog
from temporalio import activity
from temporalio.client import Client, RPCTimeoutOrCancelledError, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.client import names
from perdure.errors import RateLimited
from perdure.rollouts.messages import AskPermit, CreateRefused, ReadyPermit, ReadyTaken
from perdure.rollouts.sandbox import ready

log = structlog.get_logger("perdure.admission")

PATIENCE_S = 10.0
"""An account workflow that does not answer within this time counts as full."""


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

    async def taken(self, account: str, taken: ReadyTaken) -> None:
        await _signal(activity.client(), account, "taken", taken)

    async def release(self, account: str, holder: str) -> None:
        await _signal(activity.client(), account, "release", holder)

    def ahead(self, account: str, provider: str) -> "ReadyPermits":
        return ReadyPermits(activity.client(), account, provider)


class ReadyPermits:
    """Permits of sandboxes that are booted ahead, also after the activity has ended.

    If a signal does not arrive, nothing fails: the account's workflow looks up its holders itself.
    """

    def __init__(self, client: Client, account: str, provider: str) -> None:
        self._client, self._account, self._provider = client, account, provider

    async def reserve(self, identity: str) -> bool:
        keeper = self._client.get_workflow_handle(names.account_id(self._account))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await keeper.execute_update("reserve", self._permit(identity))
        except (WorkflowUpdateFailedError, RPCError, RPCTimeoutOrCancelledError, TimeoutError):
            return False
        return True

    async def is_up(self, identity: str) -> None:
        await self._tell("ahead_started", self._permit(identity))

    async def refused(self, identity: str, error: RateLimited) -> None:
        holder = ready.owner(identity)
        refused = CreateRefused(holder=holder, limit=error.limit, retry_after=error.retry_after)
        await self._tell("refused", refused)

    async def release(self, identity: str) -> None:
        await self._tell("release", ready.owner(identity))

    def _permit(self, identity: str) -> ReadyPermit:
        return ReadyPermit(holder=ready.owner(identity), provider=self._provider)

    async def _tell(self, signal: str, argument: object) -> None:
        try:
            await _signal(self._client, self._account, signal, argument)
        except RPCError as error:
            log.warning(
                "cannot signal the workflow of the account", signal=signal, reason=str(error)
            )


async def _signal(client: Client, account: str, signal: str, argument: object) -> None:
    try:
        await client.get_workflow_handle(names.account_id(account)).signal(signal, argument)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:  # then it keeps no permits
            raise
