"""HostWorkflow: tracks whether one host is alive. While the host is lost, other workers answer for
it.

A host shows that it is alive by heartbeats of one long activity, `serve_term`, which add no events.
A separate process sends them (`workers.host.host_heartbeat`), so a stopped or busy worker does not look like
a lost host. `workers/host/README.md` draws the sequence.
"""

import asyncio
import contextlib
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from perdure.client import temporal_names
    from perdure.rollouts.activity_messages import WORKER_EVICTED, HostState, Term
    from workflows import activity_options
    from workflows.workflow_failures import (
        is_evicted_from_cache,
        is_schedule_to_start_timeout,
        stop_if_cancelled,
        type_of,
    )


@workflow.defn(name=temporal_names.HOST)
class HostWorkflow:
    @workflow.init
    def __init__(self, term: Term) -> None:
        self.term = term
        self.lost = False

    @workflow.run
    async def run(self, term: Term) -> None:
        while True:
            await self._serves()
            self.term = self.term.model_copy(update={"number": self.term.number + 1})
            self.lost = True
            if not await self._comes_back():
                return  # the next start of this workflow passes in the term number
            self.lost = False

    @workflow.query
    def state(self) -> HostState:
        return HostState(number=self.term.number, lost=self.lost)

    def _is_ahead(self, number: Any) -> bool:
        """Adopt a later term that the host reports after the server was restored from a backup."""
        if not isinstance(number, int) or number <= self.term.number:
            return False
        self.term = self.term.model_copy(update={"number": number})
        return True

    async def _serves(self) -> None:
        """Returns when the host has been silent for too long or has left."""
        while True:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(self.term)
            try:
                number = await workflow.execute_activity(
                    "serve_term",
                    self.term,
                    **activity_options.described(
                        activity_options.serve_term(self.term), "heartbeats of the host"
                    ),
                )
                if not self._is_ahead(number):
                    return  # the host has left
            except ActivityError as error:
                stop_if_cancelled()
                if is_schedule_to_start_timeout(error):
                    return  # the host stayed silent when it was asked again

    async def _comes_back(self) -> bool:
        """Let other workers answer for the host until it has killed the sandboxes of its last
        term."""
        answering = asyncio.create_task(self._stand_in())
        try:
            number = await workflow.execute_activity(
                "begin_anew",
                self.term,
                **activity_options.described(
                    activity_options.begin_anew(self.term), "waits for the host"
                ),
            )
            self._is_ahead(number)
        except ActivityError as error:
            stop_if_cancelled()
            if not is_schedule_to_start_timeout(error):
                raise
            return False
        finally:
            if not is_evicted_from_cache():
                answering.cancel()
                with contextlib.suppress(asyncio.CancelledError, ActivityError):
                    await answering
        return True

    async def _stand_in(self) -> None:
        """Runs until this task is cancelled. The loop checks for that itself: if the worker stops
        at the same moment, the activity fails as evicted, not as cancelled."""
        task = asyncio.current_task()
        while task is not None and not task.cancelling():
            try:
                await workflow.execute_activity(
                    "stand_in",
                    self.term,
                    **activity_options.described(
                        activity_options.stand_in(), "answers for the lost host"
                    ),
                )
            except ActivityError as error:
                if type_of(error) != WORKER_EVICTED:
                    raise
