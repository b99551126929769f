"""The rollouts in flight of one run: starts the next when there is room, and counts how they end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.client import names
    from perdure.client import search_attributes as attributes
    from perdure.rollouts.messages import ACTION_NEEDED, Page, PageRequest, RolloutAgain
    from perdure.types import (
        EpisodeRef,
        GroupRequest,
        RolloutRequest,
        RolloutStatus,
        RunRequest,
        RunStatus,
    )
    from workflows import activity_options
    from workflows.children import play_rollout, summary_of
    from workflows.failures import stop_if_cancelled, was_dropped
    from workflows.orders import ordered

PAGE = 100
"""Instances that one activity loads."""
STILL_RUNNING = "running"
"""Used instead of a status, for stragglers that outlive their group."""


@dataclass
class Throttle:
    """How many rollouts may be in flight: set by a person's updates, read by the window."""

    concurrency: int = 0
    paused: bool = False
    attention: str = ""
    """Why the window paused itself: a failure that only a person can cure."""

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        if not paused:
            self.attention = ""

    def stop_for(self, attention: str) -> None:
        self.paused, self.attention = True, attention


@dataclass
class Counts:
    """Counts of rollouts of a run, or of a part of it, by state."""

    started: int = 0
    done: int = 0
    running: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    by_outcome: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, parts: "Iterable[Counts | RunStatus]") -> "Counts":
        """The sum."""
        total = cls()
        for part in parts:
            total.started += part.started
            total.done += part.done
            total.running += part.running
            total.by_status.update(part.by_status)
            total.by_outcome.update(part.by_outcome)
        return total

    def status(
        self, run_id: str, state: str, total: int, concurrency: int, attention: str = ""
    ) -> RunStatus:
        """`total`: rollouts that are planned."""
        return RunStatus(
            run_id=run_id,
            state=state,
            total=total,
            started=self.started,
            done=self.done,
            running=self.running,
            concurrency=concurrency,
            attention=attention,
            by_status=dict(self.by_status),
            by_outcome=dict(self.by_outcome),
        )


class Window:
    """Plays instances [start, stop) of a run, `throttle.concurrency` rollouts at a time.

    A failure that only a person can cure (configuration, quota) pauses the window instead of
    failing every rollout behind it.
    """

    def __init__(self, run: RunRequest, throttle: Throttle) -> None:
        self.run = run
        self.throttle = throttle
        self.counts = Counts()
        self.nothing_left_to_start = False

    async def play(self, start: int, stop: int) -> None:
        tasks: set[asyncio.Task[None]] = set()
        weight = self.run.rollouts_each
        try:
            async for entry in self._entries(start, stop):
                await workflow.wait_condition(lambda: self._has_room(weight))
                self.counts.started += weight
                self.counts.running += weight
                task = asyncio.create_task(self._play_entry(entry))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            self.nothing_left_to_start = True
            await workflow.wait_condition(lambda: not tasks)
        except ActivityError as error:
            if not is_cancelled_exception(error):  # the list cannot be read: finish what runs
                await workflow.wait_condition(lambda: not tasks)
            raise
        finally:
            left = [] if was_dropped() else list(tasks)
            for task in left:
                task.cancel()
            if left:
                await asyncio.gather(*left, return_exceptions=True)

    def _has_room(self, weight: int) -> bool:
        if self.throttle.paused:
            return False
        running = self.counts.running
        return running == 0 or running + weight <= self.throttle.concurrency

    async def _entries(self, start: int, stop: int) -> AsyncIterator[str | RolloutAgain]:
        """Instances, or single rollouts where the run plays them again."""
        round = self.run.again.round if self.run.again else 0
        for first in range(start, stop, PAGE):
            request = PageRequest(
                run_id=self.run.run_id, start=first, stop=min(first + PAGE, stop), round=round
            )
            options = activity_options.described(
                activity_options.bookkeeping(), f"instances from {first}"
            )
            page = await ordered("load_page", request, Page, options)
            stop_if_cancelled()
            entries: tuple[str | RolloutAgain, ...] = page.again or page.instances
            for entry in entries:
                yield entry

    async def _play_entry(self, entry: str | RolloutAgain) -> None:
        try:
            if isinstance(entry, RolloutAgain):
                self._count(await play_rollout(self._again(entry)))
                return
            template = self.run.rollout_request(entry)
            if self.run.n_samples == 1:
                self._count(await play_rollout(template))
                return
            group = GroupRequest(
                rollout=template,
                n_samples=self.run.n_samples,
                quorum=self.run.quorum,
                deadline_s=self.run.deadline_s,
                stragglers=self.run.stragglers,
            )
            await self._play_group(group)
        finally:
            self.counts.running -= self.run.rollouts_each

    def _again(self, entry: RolloutAgain) -> RolloutRequest:
        assert self.run.again is not None, "only such a run has these entries"
        request = self.run.rollout_request(entry.instance, entry.sample_index)
        update = {"round": entry.round, "start_at": self.run.again.start_at}
        return request.model_copy(update=update)

    async def _play_group(self, group: GroupRequest) -> None:
        try:
            result = await workflow.execute_child_workflow(
                names.GROUP,
                group,
                id=group.workflow_id,
                result_type=dict,
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                search_attributes=attributes.of_rollout(group.rollout),
                static_summary=f"{summary_of(group.rollout)} · group of {group.n_samples}",
            )
        except (FailureError, asyncio.CancelledError) as error:
            cancelled = is_cancelled_exception(error)
            status = RolloutStatus.CANCELLED if cancelled else RolloutStatus.FAILED
            # The group has no result. The store knows how each of its rollouts ended; `finish_run`
            # reads that when the run ends.
            self.counts.done += group.n_samples
            self.counts.by_status[status.value] += group.n_samples
            return
        for episode in result["episodes"]:
            self._count(EpisodeRef.model_validate(episode))
        if kept := group.n_samples - len(result["episodes"]):
            self.counts.by_status[STILL_RUNNING] += kept

    def _count(self, episode: EpisodeRef) -> None:
        self.counts.done += 1
        self.counts.by_status[episode.status.value] += 1
        if episode.outcome is not None:
            self.counts.by_outcome[episode.outcome.value] += 1
        if episode.failure is not None and episode.failure.type in ACTION_NEEDED:
            self.throttle.stop_for(episode.failure.message)
