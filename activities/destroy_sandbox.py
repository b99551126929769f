"""destroy_sandbox: where an attempt ends early, keep its turns and leave nothing behind."""

import contextlib

from activities.admission import Admission
from activities.boot_sandbox import sandbox_of
from activities.messages import Attempt
from activities.services import Services
from activities.shell import shell
from perdure.errors import NotFound
from perdure.storage import keys
from perdure.types import PhaseName, RolloutRequest


class DestroySandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("destroy_sandbox")
    async def destroy(self, attempt: Attempt) -> None:
        request = attempt.request
        number = attempt.attempt
        identity = await sandbox_of(self.services, attempt)
        await self._kill(request, "agent", identity)
        await self.services.ready.forget(identity)
        await self._kill(request, "grade", self.services.grade_identity(request, number))
        await self._close_session(attempt)

    async def _kill(self, request: RolloutRequest, phase: PhaseName, identity: str) -> None:
        place = await self.services.place(request, phase)
        await self.services.provider(place.provider).kill(identity)
        await Admission(self.services, place.provider, request).release()

    async def _close_session(self, attempt: Attempt) -> None:
        """Its turns are evidence: the watcher that should have closed it may be dead."""
        booted = f"{keys.attempt(attempt.request, attempt.attempt)}/sandbox.json"
        if not await self.services.store.exists(booted):
            return  # no session was ever opened, so none is waited for where no gateway runs
        if not self.services.agent(attempt.request.agent).needs_model:
            return
        session = self.services.agent_identity(attempt.request, attempt.attempt)
        with contextlib.suppress(NotFound):  # it was booted and never started
            await self.services.gateway.close(session)
