"""The messages from a rollout's stages to a provider's account: they ask for a permit, report the
outcome of the create, and release the permit after the sandbox is killed."""

import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Literal, Protocol

from perdure.errors import AccountExhausted, RateLimited
from perdure.rollouts.admission.permit_rules import AskPermit, CreateRefused
from perdure.rollouts.stage_services import Services
from perdure.types import AccountCaps, RolloutRequest


class SignalAccount(Protocol):
    """Signal the workflow that keeps an account's permits. `ask` starts it if necessary."""

    def __call__(
        self,
        account: str,
        signal: Literal["ask", "started", "refused", "release"],
        message: AskPermit | CreateRefused | str,
    ) -> Awaitable[None]: ...


@dataclass(frozen=True)
class Admission:
    """One rollout's requests to one provider's account. If it is not metered, nothing is sent."""

    caps: AccountCaps | None
    account: str
    request: RolloutRequest
    tell: SignalAccount

    @classmethod
    def of(
        cls, services: Services, provider: str, request: RolloutRequest, tell: SignalAccount
    ) -> "Admission":
        caps = services.caps(provider)
        account = services.provider(provider).account if caps is not None else ""
        return cls(caps, account, request, tell)

    @property
    def metered(self) -> bool:
        return self.caps is not None

    @property
    def _holder(self) -> str:
        return self.request.workflow_id

    async def ask(self, step: str) -> None:
        """Ask for a permit; the account signals `granted` to the workflow. Idempotent."""
        if self.caps is not None:
            run = self.request.run_id
            asked = AskPermit(holder=self._holder, run=run, step=step, caps=self.caps)
            await self.tell(self.account, "ask", asked)

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Wraps a create and reports a refusal that may pass soon. Raises: RateLimited, unchanged."""
        try:
            yield
        except AccountExhausted:  # the note in the store stops all rollouts of the account
            raise
        except RateLimited as error:
            if self.metered:
                refused = CreateRefused(
                    holder=self._holder, limit=error.limit, retry_after=error.retry_after
                )
                await self.tell(self.account, "refused", refused)
            raise

    async def started(self) -> None:
        """Report that the granted sandbox is up."""
        if self.metered:
            await self.tell(self.account, "started", self._holder)

    async def release(self) -> None:
        """Release the permit of a sandbox that is gone. Idempotent."""
        if self.metered:
            await self.tell(self.account, "release", self._holder)
