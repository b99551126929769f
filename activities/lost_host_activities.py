"""stand_in: answers activities sent to a lost host, so that its rollouts move at once."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.worker import Worker

from activities.activity_decorator import GRACE, shell
from perdure.client import temporal_names
from perdure.client.temporal_client import connect
from perdure.errors import Boundary
from perdure.rollouts.activity_messages import (
    HOST_LOST,
    SANDBOX_LOST,
    Attempt,
    HostState,
    SweepRequest,
    Term,
)
from perdure.rollouts.sandbox.host_term import end_terms_before
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.sandbox_reaper import SweepReport


class StandIn:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("stand_in", leave_at_once=True)
    async def stand_in(self, term: Term) -> None:
        """Runs until it is cancelled. `term` is the one that the host would begin next."""
        await end_terms_before(self.services.store, term.host, term.number)
        client = activity.client()
        if term.host == self.services.host:
            # A connection allows one worker per queue, and this host's worker polls these queues.
            client = await connect(settings=self.services.settings)
        lost = LostHost(client, term)
        async with AsyncExitStack() as workers:
            for queue in (
                temporal_names.host_queue(term.host),
                temporal_names.upkeep_queue(term.host),
            ):
                worker = Worker(
                    client,
                    task_queue=queue,
                    activities=lost.activities(),
                    graceful_shutdown_timeout=GRACE,
                )
                await workers.enter_async_context(worker)
            await asyncio.Event().wait()


class LostHost:
    """The activities of the lost host's worker, answered without the host."""

    def __init__(self, client: Client, term: Term) -> None:
        self._client, self._term = client, term

    def activities(self) -> list[Callable[..., Any]]:
        return [self.run_agent, self.capture, self.destroy, self.sweep]

    @activity.defn(name="run_agent")
    async def run_agent(self, attempt: Attempt) -> None:
        await self._give_up()

    @activity.defn(name="capture_diff")
    async def capture(self, attempt: Attempt) -> None:
        await self._give_up()

    @activity.defn(name="destroy_sandbox")
    async def destroy(self, attempt: Attempt) -> None:
        """Succeeds at once: the host kills its sandboxes itself before it serves again."""
        await self._be_sure()

    @activity.defn(name="sweep_sandboxes")
    async def sweep(self, request: SweepRequest) -> SweepReport:
        await self._be_sure()
        return SweepReport()

    async def _give_up(self) -> None:
        await self._be_sure()
        raise ApplicationError(
            f"host {self._term.host} is lost: it sent no heartbeat for "
            f"{self._term.silent_s:g} s, or it left",
            Boundary.SANDBOX.value,
            HOST_LOST,
            type=SANDBOX_LOST,
            non_retryable=True,
            category=ApplicationErrorCategory.BENIGN,
        )

    async def _be_sure(self) -> None:
        """Check that the host is still lost: it may be back if this process was stopped for a
        while."""
        handle = self._client.get_workflow_handle(temporal_names.host_id(self._term.host))
        state = await handle.query("state", result_type=HostState)
        if not state.lost or state.number != self._term.number:
            raise ApplicationError(
                f"host {self._term.host} is back: its own workers run this activity"
            )
