"""Permits of metered provider accounts: asked for, reported on and given back from activities.

The rules are `perdure.sandboxes.permits`, kept for all workers by one SandboxAccountWorkflow per
account. Whoever kills a sandbox gives its permit back; a closed workflow's are found by the keeper.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence

from temporalio import activity
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import Asked, Attempt, Refused
from activities.services import Services
from activities.shell import shell
from perdure.client import names
from perdure.errors import RateLimited
from perdure.types import AccountCaps, RolloutRequest


class Admission:
    """One rollout's dealings with the account of one provider; nothing where it is not metered."""

    def __init__(self, services: Services, provider: str, request: RolloutRequest) -> None:
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

    async def release(self) -> None:
        """The sandbox is gone. Nothing was held = success."""
        await self._tell("release", self.request.workflow_id)

    async def _tell(self, signal: str, argument: object) -> None:
        if not self.metered:
            return
        handle = activity.client().get_workflow_handle(names.account_id(self.account))
        try:
            await handle.signal(signal, argument)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:  # nobody holds anything there
                raise


def agent_step(attempt: Attempt) -> str:
    return f"{attempt.attempt}-agent"


def grade_step(attempt: Attempt) -> str:
    return f"{attempt.attempt}-grade"


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
