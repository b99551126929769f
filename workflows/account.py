"""SandboxAccountWorkflow: keeps the permits of one provider account for all workers.

The rules are `perdure.sandboxes.permits`; here are its clock, its memory and its messages. It ends
when nobody holds or wants anything, and is started again by the next who asks.
"""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

with workflow.unsafe.imports_passed_through():
    from perdure.client import names
    from perdure.rollouts.messages import Asked, ReadyPermit, Refused, Taken
    from perdure.sandboxes.permits import Account, AccountState, PermitRequest
    from workflows import policies

IDLE = timedelta(minutes=5)
"""It remembers what an account was found to take for so long after the last sandbox."""
CHECK_EVERY_S = 60.0
CHECK_MOST = 100
"""Holders looked up at a time, those that held longest without being looked up first."""
SHORTEST_S = 0.01
"""Of a pause: the clock stands still until the next one."""
JITTER = 0.1
"""Part of a pause that is added by chance: other users of the account pace theirs too."""


@workflow.defn(name=names.ACCOUNT)
class SandboxAccountWorkflow:
    @workflow.init
    def __init__(self, state: AccountState | None = None) -> None:
        self.account = Account(state or AccountState(), self._now())
        self.news = False
        self.again: list[PermitRequest] = []

    @workflow.run
    async def run(self, state: AccountState | None = None) -> None:
        silent = False
        while True:
            self.news = False
            granted = self.again + self.account.grants(self._now())
            self.again = []
            await asyncio.gather(*(self._grant(wish) for wish in granted))
            await self._give_way()
            await self._check_holders(silent)
            if workflow.info().is_continue_as_new_suggested() and not self.again:
                workflow.continue_as_new(self.account.state())
            silent = not await self._news()
            if silent and self.account.empty:
                return

    @workflow.signal
    def ask(self, asked: Asked) -> None:
        if self.account.ask(asked.holder, asked.run, asked.step, asked.caps):
            self.again.append(
                PermitRequest(holder=asked.holder, run=asked.run, step=asked.step, order=0)
            )
        self.news = True

    @workflow.signal
    def started(self, holder: str) -> None:
        self.account.started(holder)
        self.news = True

    @workflow.signal
    def refused(self, refused: Refused) -> None:
        self.account.refused(refused.holder, refused.limit, refused.retry_after, self._now())
        self.news = True

    @workflow.signal
    def release(self, holder: str) -> None:
        self.account.release(holder)
        self.news = True

    @workflow.update
    def reserve(self, asked: ReadyPermit) -> None:
        """A slot for a sandbox that is booted ahead; refused unless one is free that nobody wants."""
        self.account.reserve(asked.holder, asked.provider, self._now())

    @reserve.validator
    def _has_room(self, asked: ReadyPermit) -> None:
        """A refusal leaves nothing in the history, so it changes nothing here either."""
        if not self.account.has_room(self._now()):
            raise ValueError("no slot of the account is free for a sandbox booted ahead")

    @workflow.signal
    def stands(self, ready: ReadyPermit) -> None:
        self.account.ahead_started(ready.holder, ready.provider, self._now())
        self.news = True

    @workflow.signal
    def taken(self, taken: Taken) -> None:
        self.account.hand_over(taken.ready, taken.holder, taken.run, taken.step)
        self.news = True

    @workflow.query
    def state(self) -> AccountState:
        """Who waits, who holds, and what the account was found to take."""
        return self.account.state()

    def _now(self) -> float:
        return workflow.time()

    async def _grant(self, wish: PermitRequest) -> None:
        handle = workflow.get_external_workflow_handle(wish.holder)
        try:
            await handle.signal(names.GRANTED, wish.step)
        except FailureError:  # it is over: its permit goes to the next
            self.account.release(wish.holder)
            self.news = True

    async def _news(self) -> bool:
        """Wait until something was said, or there may be more to grant. False: nothing happened."""
        pause = self.account.wake_in(self._now())
        if pause is not None:
            pause = max(SHORTEST_S, pause + pause * JITTER * workflow.random().random())
        if self.account.waiting:
            pause = CHECK_EVERY_S if pause is None else min(pause, CHECK_EVERY_S)
        try:
            await workflow.wait_condition(
                lambda: self.news, timeout=IDLE if pause is None else timedelta(seconds=pause)
            )
        except TimeoutError:
            return False
        return True

    async def _give_way(self) -> None:
        """While somebody waits on a full account, sandboxes that were booted ahead are ended."""
        leaving = self.account.to_end(self._now())
        if not leaving:
            return
        permits = [ReadyPermit(holder=one.holder, provider=one.provider) for one in leaving]
        try:
            ended = await workflow.execute_activity(
                "end_ready",
                args=[permits],
                result_type=list[str],
                **policies.described(policies.look(), "sandboxes booted ahead give way"),
            )
        except ActivityError:
            return  # they end by themselves
        for holder in ended:
            self.account.release(holder)
            self.news = True

    async def _check_holders(self, silent: bool) -> None:
        """While somebody waits, and in silence: permits of workflows that were terminated come back."""
        wanted = self.account.waiting or (silent and self.account.permits)
        if not wanted or self._now() - self.account.checked_at < CHECK_EVERY_S:
            return
        self.account.checked_at = self._now()
        holders = self.account.longest_unchecked(CHECK_MOST)
        if self.account.permits and not holders:
            return  # only what was booted ahead: no workflow holds that
        try:
            closed = await workflow.execute_activity(
                "closed_holders",
                holders,
                result_type=list[str],
                **policies.described(policies.look(), "who of the holders is over"),
            )
        except ActivityError:
            return  # nobody could look: permits are worth more than an answer
        for holder in closed:
            self.account.release(holder)
