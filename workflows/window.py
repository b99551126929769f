"""The rollouts in flight of one run: starts the next when there is room, pauses, resizes, counts."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from temporalio import workflow
from temporalio.exceptions import FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.client import names
    from perdure.client import search_attributes as attributes
    from perdure.rollouts.messages import ACTION_NEEDED, Page, PageRequest
    from perdure.types import EpisodeRef, GroupRequest, RolloutStatus, RunRequest
    from workflows import policies
    from workflows.children import play_rollout, summary_of
    from workflows.failures import stop_if_cancelled, was_dropped

PAGE = 100
STILL_RUNNING = "running"
"""Counted in the place of a status: stragglers that outlive their group."""


class Window:
    """Plays instances [start, stop) of a run, `concurrency` rollouts at a time.

    A failure that only a person can cure (configuration, quota) pauses the window instead of
    failing every rollout behind it.
    """

    def __init__(self, run: RunRequest, concurrency: int) -> None:
        self.run = run
        self.concurrency = concurrency
        self.paused = False
        self.attention = ""
        self.started = 0
        self.done = 0
        self.in_flight = 0
        self.by_status: Counter[str] = Counter()
        self.by_outcome: Counter[str] = Counter()
        self.nothing_left_to_start = False

    async def play(self, start: int, stop: int) -> None:
        tasks: set[asyncio.Task[None]] = set()
        weight = self.run.n_samples
        try:
            async for instance in self._instances(start, stop):
                await workflow.wait_condition(lambda: self._has_room(weight))
                self.started += weight
                self.in_flight += weight
                task = asyncio.create_task(self._play_instance(instance))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            self.nothing_left_to_start = True
            await workflow.wait_condition(lambda: not tasks)
        finally:
            left = [] if was_dropped() else list(tasks)
            for task in left:
                task.cancel()
            if left:
                await asyncio.gather(*left, return_exceptions=True)

    def resize(self, concurrency: int) -> None:
        self.concurrency = concurrency

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused, self.attention = False, ""

    def _has_room(self, weight: int) -> bool:
        if self.paused:
            return False
        return self.in_flight == 0 or self.in_flight + weight <= self.concurrency

    async def _instances(self, start: int, stop: int) -> AsyncIterator[str]:
        for first in range(start, stop, PAGE):
            request = PageRequest(run_id=self.run.run_id, start=first, stop=min(first + PAGE, stop))
            page = await workflow.execute_activity(
                "load_page",
                request,
                result_type=Page,
                **policies.described(policies.bookkeeping(), f"instances from {first}"),
            )
            stop_if_cancelled()
            for instance in page.instances:
                yield instance

    async def _play_instance(self, instance: str) -> None:
        template = self.run.rollout_request(instance)
        try:
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
            self.in_flight -= self.run.n_samples

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
            # Without a result; what some of them came to, the store knows when the run ends.
            self.done += group.n_samples
            self.by_status[status.value] += group.n_samples
            return
        for episode in result["episodes"]:
            self._count(EpisodeRef.model_validate(episode))
        if kept := group.n_samples - len(result["episodes"]):
            self.by_status[STILL_RUNNING] += kept

    def _count(self, episode: EpisodeRef) -> None:
        self.done += 1
        self.by_status[episode.status.value] += 1
        if episode.outcome is not None:
            self.by_outcome[episode.outcome.value] += 1
        if episode.failure is not None and episode.failure.type in ACTION_NEEDED:
            self.paused = True
            self.attention = episode.failure.message
