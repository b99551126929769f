"""Permits of metered provider accounts: asked for, reported on and given back from activities.

The rules are `perdure.sandboxes.permits`, kept for all workers by one SandboxAccountWorkflow per
account. Whoever kills a sandbox gives its permit back; a closed workflow's are found by the keeper.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import structlog
from temporalio import activity
from temporalio.client import (
    Client,
    RPCTimeoutOrCancelledError,
    WorkflowExecutionStatus,
    WorkflowUpdateFailedError,
)
from temporalio.service import RPCError, RPCStatusCode

from activities import ready
from activities.messages import Asked, Attempt, ReadyPermit, Refused, Taken
from activities.services import Services
from activities.shell import shell
from perdure.client import names
from perdure.errors import PerdureError, RateLimited
from perdure.types import AccountCaps, RolloutRequest

log = structlog.get_logger("perdure.admission")

PATIENCE_S = 10.0
"""A keeper that does not say by then whether a slot is free has none to spare."""


class Admission:
    """One rollout's dealings with the account of one provider; nothing where it is not metered."""

    def __init__(self, services: Services, provider: str, request: RolloutRequest) -> None:
        self.provider = provider
        self.caps: AccountCaps | None = services.caps(provider)
        self.metered = self.caps is not None
        self.account = services.provider(provider).account if self.metered else ""
        self.request = request

    async def ask(self, step: str) -> None:
        """Queue up; the rollout's workflow hears `granted`. Asking again changes nothing."""
        if self.caps is None:
            return
        asked = Asked(
            holder=self.request.workflow_id, run=self.request.run_id, step=step, caps=self.caps
        )
        await activity.client().start_workflow(
            names.ACCOUNT,
            id=names.account_id(self.account),
            task_queue=names.WORKFLOWS_QUEUE,
            start_signal="ask",
            start_signal_args=[asked],
            static_summary=f"permits of {self.account}",
        )

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Around a create: tells the keeper of a refusal. Raises: RateLimited, unchanged."""
        try:
            yield
        except RateLimited as error:
            refused = Refused(
                holder=self.request.workflow_id, limit=error.limit, retry_after=error.retry_after
            )
            await self._tell("refused", refused)
            raise

    async def started(self) -> None:
        """The sandbox that was granted is up."""
        await self._tell("started", self.request.workflow_id)

    async def took(self, identity: str, step: str) -> None:
        """The sandbox that was booted ahead under this identity is this rollout's, with its slot."""
        taken = Taken(
            ready=ready.owner(identity),
            holder=self.request.workflow_id,
            run=self.request.run_id,
            step=step,
        )
        await self._tell("taken", taken)

    def ahead(self) -> "ReadyPermits":
        """For sandboxes that are booted ahead on the same account."""
        return ReadyPermits(
            self.provider, self.account, activity.client() if self.metered else None
        )

    async def release(self) -> None:
        """The sandbox is gone. Nothing was held = success."""
        await self._tell("release", self.request.workflow_id)

    async def _tell(self, signal: str, argument: object) -> None:
        if self.metered:
            await _signal(activity.client(), self.account, signal, argument)


class ReadyPermits:
    """Permits of sandboxes that nobody owns yet; all may be had where nothing is metered.

    A keeper that does not hear is no failure: it finds out in time, and nobody waits for an answer.
    """

    def __init__(self, provider: str, account: str, client: Client | None) -> None:
        self._provider, self._account, self._client = provider, account, client

    async def reserve(self, identity: str) -> bool:
        """A slot that nobody waits for; False: none is free."""
        if self._client is None:
            return True
        keeper = self._client.get_workflow_handle(names.account_id(self._account))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await keeper.execute_update("reserve", self._permit(identity))
        except (WorkflowUpdateFailedError, RPCError, RPCTimeoutOrCancelledError, TimeoutError):
            return False
        return True

    async def stands(self, identity: str) -> None:
        """It is up."""
        await self._tell("stands", self._permit(identity))

    async def refused(self, identity: str, error: RateLimited) -> None:
        """The provider answered 429 to its create."""
        holder = ready.owner(identity)
        refused = Refused(holder=holder, limit=error.limit, retry_after=error.retry_after)
        await self._tell("refused", refused)

    async def release(self, identity: str) -> None:
        """It is gone."""
        await self._tell("release", ready.owner(identity))

    def _permit(self, identity: str) -> ReadyPermit:
        return ReadyPermit(holder=ready.owner(identity), provider=self._provider)

    async def _tell(self, signal: str, argument: object) -> None:
        if self._client is None:
            return
        try:
            await _signal(self._client, self._account, signal, argument)
        except RPCError as error:
            log.warning("the keeper was not told", signal=signal, reason=str(error))


async def _signal(client: Client, account: str, signal: str, argument: object) -> None:
    try:
        await client.get_workflow_handle(names.account_id(account)).signal(signal, argument)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:  # nobody holds anything there
            raise


def agent_step(attempt: Attempt) -> str:
    return f"{attempt.attempt}-agent"


def grade_step(attempt: Attempt) -> str:
    return f"{attempt.attempt}-grade"


class EndReady:
    """Ends sandboxes that were booted ahead, for those who wait."""

    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("end_ready")
    async def end(self, permits: Sequence[ReadyPermit]) -> list[str]:
        """Holders of those that are gone; who was taken meanwhile is not among them."""
        ended = await asyncio.gather(*map(self._end, permits))
        return [permit.holder for permit, gone in zip(permits, ended, strict=True) if gone]

    async def _end(self, permit: ReadyPermit) -> bool:
        identity = permit.holder.removeprefix(ready.OWNER)
        try:
            return await ready.give_way(
                self.services.store, self.services.provider(permit.provider), identity
            )
        except PerdureError as error:
            log.warning("ready sandbox not ended", identity=identity, reason=str(error))
            return False


class ClosedHolders:
    @shell("closed_holders")
    async def closed(self, holders: Sequence[str]) -> list[str]:
        """Those whose workflow is over: terminated, or lost before it gave its permit back."""
        return [holder for holder in holders if not await is_open(holder)]


async def is_open(workflow_id: str) -> bool:
    """Asked from the server itself, never from lagging visibility."""
    try:
        described = await activity.client().get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return described.status is WorkflowExecutionStatus.RUNNING
