"""SandboxAccountWorkflow: keeps the permits of one provider account for all workers.

`perdure.rollouts.admission.permit_rules` has the rules. This workflow adds the clock, durable state and
messages. It ends when no rollout holds or waits for a permit. The next rollout that asks starts it
again.
"""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

with workflow.unsafe.imports_passed_through():
    from perdure.client import temporal_names
    from perdure.rollouts.admission.permit_rules import (
        Account,
        AskPermit,
        CreateRefused,
        PermitRequest,
    )
    from workflows import activity_options
    from workflows.activity_redispatch import ordered

IDLE = timedelta(minutes=5)
"""How long the workflow remembers the account's limits after the last sandbox has ended."""
CHECK_EVERY_S = 60.0
CHECK_MOST = 100
"""How many holders one activity looks up, the least recently checked ones first."""
SHORTEST_S = 0.01
"""Shortest timer in seconds, because workflow time advances only when a timer fires."""
JITTER = 0.1
"""Random fraction added to a wait, because other users of the account pace their calls too."""


@workflow.defn(name=temporal_names.ACCOUNT)
class SandboxAccountWorkflow:
    @workflow.init
    def __init__(self, account: Account | None = None) -> None:
        self.account = account or Account.new(self._now())
        self.has_news = False
        self.grant_again: list[PermitRequest] = []

    @workflow.run
    async def run(self, account: Account | None = None) -> None:
        idle = False
        while True:
            self.has_news = False
            granted = self.grant_again + self.account.grants(self._now())
            self.grant_again = []
            await asyncio.gather(*(self._grant(request) for request in granted))
            await self._check_holders(idle)
            if workflow.info().is_continue_as_new_suggested() and not self.grant_again:
                workflow.continue_as_new(self.account)
            idle = not await self._wait_for_news()
            if idle and self.account.empty:
                return

    @workflow.signal
    def ask(self, asked: AskPermit) -> None:
        if self.account.ask(asked):
            self.grant_again.append(
                PermitRequest(holder=asked.holder, run=asked.run, step=asked.step, order=0)
            )
        self.has_news = True

    @workflow.signal
    def started(self, holder: str) -> None:
        self.account.started(holder)
        self.has_news = True

    @workflow.signal
    def refused(self, refused: CreateRefused) -> None:
        self.account.refused(refused, self._now())
        self.has_news = True

    @workflow.signal
    def release(self, holder: str) -> None:
        self.account.release(holder)
        self.has_news = True

    @workflow.query
    def state(self) -> Account:
        """Which rollouts wait, which hold permits, and the observed limits."""
        return self.account

    def _now(self) -> float:
        return workflow.time()

    async def _grant(self, request: PermitRequest) -> None:
        handle = workflow.get_external_workflow_handle(request.holder)
        try:
            await handle.signal(temporal_names.GRANTED, request.step)
        except FailureError:  # the rollout is closed, so the next one gets the permit
            self.account.release(request.holder)
            self.has_news = True

    async def _wait_for_news(self) -> bool:
        """Wait for a message, or until more permits may be granted. False if a timeout came
        first."""
        pause = self.account.wake_in(self._now())
        if pause is not None:
            pause = max(SHORTEST_S, pause + pause * JITTER * workflow.random().random())
        if self.account.waiting:
            pause = CHECK_EVERY_S if pause is None else min(pause, CHECK_EVERY_S)
        try:
            await workflow.wait_condition(
                lambda: self.has_news, timeout=IDLE if pause is None else timedelta(seconds=pause)
            )
        except TimeoutError:
            return False
        return True

    async def _check_holders(self, idle: bool) -> None:
        """Revoke permits of closed workflows, while a rollout waits or if no message arrives."""
        wanted = self.account.waiting or (idle and self.account.permits)
        if not wanted or self._now() - self.account.checked_at < CHECK_EVERY_S:
            return
        self.account.checked_at = self._now()
        holders = self.account.longest_unchecked(CHECK_MOST)
        options = activity_options.described(activity_options.look(), "which holders are closed")
        try:
            closed = await ordered("closed_holders", holders, list[str], options, evicted=_give_up)
        except ActivityError:
            return  # without an answer, keep the permits, so that none is granted twice
        for holder in closed:
            self.account.release(holder)


def _give_up(error: ActivityError) -> None:
    """Do not dispatch the lookup again when its worker shuts down: the account repeats it
    anyway."""
    raise error
