"""Permits of metered provider accounts: stages ask for them, report on them and give them back.

The rules are `perdure.sandboxes.permits`; one SandboxAccountWorkflow per account keeps the permits
for all workers. The stage that kills a sandbox gives its permit back. When a workflow was closed
before that, the account workflow finds out by itself.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import structlog

from perdure.errors import PerdureError, RateLimited
from perdure.rollouts.messages import AskPermit, CreateRefused, ReadyPermit, ReadyTaken
from perdure.rollouts.sandbox import ready
from perdure.rollouts.sandbox.ready import Permits, Unmetered
from perdure.rollouts.services import Services
from perdure.types import AccountCaps, RolloutRequest

log = structlog.get_logger("perdure.admission")


class Accounts(Protocol):
    """Messages to the workflow that keeps the permits of an account."""

    async def ask(self, account: str, asked: AskPermit) -> None:
        """Starts that workflow where it does not run."""
        ...

    async def started(self, account: str, holder: str) -> None: ...

    async def refused(self, account: str, refused: CreateRefused) -> None: ...

    async def taken(self, account: str, taken: ReadyTaken) -> None: ...

    async def release(self, account: str, holder: str) -> None: ...

    def ahead(self, account: str, provider: str) -> Permits:
        """For sandboxes that are booted ahead on the account."""
        ...


@dataclass(frozen=True)
class Admission:
    """One rollout's dealings with the account of one provider; no messages if it is not metered."""

    provider: str
    caps: AccountCaps | None
    account: str
    request: RolloutRequest
    accounts: Accounts

    @classmethod
    def of(
        cls, services: Services, provider: str, request: RolloutRequest, accounts: Accounts
    ) -> "Admission":
        caps = services.caps(provider)
        account = services.provider(provider).account if caps is not None else ""
        return cls(provider, caps, account, request, accounts)

    @property
    def metered(self) -> bool:
        return self.caps is not None

    async def ask(self, step: str) -> None:
        """Queue up; the rollout's workflow is sent `granted`. Asking again changes nothing."""
        if self.caps is None:
            return
        asked = AskPermit(
            holder=self.request.workflow_id, run=self.request.run_id, step=step, caps=self.caps
        )
        await self.accounts.ask(self.account, asked)

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Around a create: reports a refusal. Raises: RateLimited, unchanged."""
        try:
            yield
        except RateLimited as error:
            if self.metered:
                refused = CreateRefused(
                    holder=self.request.workflow_id,
                    limit=error.limit,
                    retry_after=error.retry_after,
                )
                await self.accounts.refused(self.account, refused)
            raise

    async def started(self) -> None:
        """The sandbox that was granted is up."""
        if self.metered:
            await self.accounts.started(self.account, self.request.workflow_id)

    async def took(self, identity: str, step: str) -> None:
        """This rollout has taken the sandbox booted ahead under `identity`, and its permit."""
        if not self.metered:
            return
        taken = ReadyTaken(
            ready=ready.owner(identity),
            holder=self.request.workflow_id,
            run=self.request.run_id,
            step=step,
        )
        await self.accounts.taken(self.account, taken)

    async def release(self) -> None:
        """The sandbox is gone. Releasing what is not held changes nothing."""
        if self.metered:
            await self.accounts.release(self.account, self.request.workflow_id)

    def ahead(self) -> Permits:
        """For sandboxes that are booted ahead on the same account."""
        return self.accounts.ahead(self.account, self.provider) if self.metered else Unmetered()


async def end_ready(services: Services, permit: ReadyPermit) -> bool:
    """End a sandbox that was booted ahead. False: a rollout took it first, or the kill failed."""
    identity = permit.holder.removeprefix(ready.OWNER)
    try:
        return await ready.give_way(services.store, services.provider(permit.provider), identity)
    except PerdureError as error:
        log.warning("cannot end a ready sandbox", identity=identity, reason=str(error))
        return False
