"""Permits of metered provider accounts: stages ask for them, report on them and give them back.

The rules are `perdure.sandboxes.permits`; one SandboxAccountWorkflow per account keeps the permits
for all workers. The stage that kills a sandbox gives its permit back. When a workflow was closed
before that, the account workflow finds out by itself.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from perdure.errors import RateLimited
from perdure.rollouts.messages import AskPermit, CreateRefused
from perdure.rollouts.services import Services
from perdure.types import AccountCaps, RolloutRequest


class Accounts(Protocol):
    """Messages to the workflow that keeps the permits of an account."""

    async def ask(self, account: str, asked: AskPermit) -> None:
        """Starts that workflow where it does not run."""
        ...

    async def started(self, account: str, holder: str) -> None: ...

    async def refused(self, account: str, refused: CreateRefused) -> None: ...

    async def release(self, account: str, holder: str) -> None: ...


@dataclass(frozen=True)
class Admission:
    """One rollout's dealings with the account of one provider; no messages if it is not metered."""

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
        return cls(caps, account, request, accounts)

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

    async def release(self) -> None:
        """The sandbox is gone. Releasing what is not held changes nothing."""
        if self.metered:
            await self.accounts.release(self.account, self.request.workflow_id)
