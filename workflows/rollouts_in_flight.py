"""The rollouts of one run in flight: starts the next when there is room, and counts how they
end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.client import search_attribute_keys as attributes
    from perdure.client import temporal_names
    from perdure.rollouts.activity_messages import (
        ACTION_NEEDED,
        Page,
        PageRequest,
        RolloutAgain,
        Truncation,
    )
    from perdure.types import (
        EpisodeRef,
        GroupRequest,
        RolloutRequest,
        RolloutStatus,
        RunRequest,
        RunStatus,
        TokenCounts,
    )
    from workflows import activity_options
    from workflows.activity_redispatch import ordered
    from workflows.child_rollouts import OpenChildren, play_rollout, summary_of_group
    from workflows.run_deadline import (
        GRACE_PERIOD_S,
        RecordedTimes,
        run_until_truncated,
        wait_until,
    )
    from workflows.run_pause import ALIKE, Throttle
    from workflows.web_ui import ChildrenPage
    from workflows.workflow_failures import is_evicted_from_cache, stop_if_cancelled

PAGE = 100
"""Instances that one activity loads."""
STILL_RUNNING = "running"
"""Used instead of a status for stragglers that outlive their group."""

PAUSE_ON_LIKE_FAILURES_PATCH_ID = "pauses-when-rollouts-fail-alike"
STOP_AT_BUDGET_PATCH_ID = "stops-buying-at-the-budget"


@dataclass
class Counts:
    """Numbers of rollouts of a run or of a part of it, by state."""

    started: int = 0
    done: int = 0
    running: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    by_outcome: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    dollars: float = 0.0
    grade_seconds: float = 0.0

    @property
    def graded(self) -> int:
        return self.by_status[RolloutStatus.GRADED]

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
            total.tokens += part.tokens
            total.dollars += part.dollars
            total.grade_seconds += part.grade_seconds
        return total

    def status(
        self, run_id: str, state: str, total: int, concurrency: int, attention: str = ""
    ) -> RunStatus:
        """`total`: the number of planned rollouts."""
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
            tokens=self.tokens,
            dollars=round(self.dollars, 6),
            grade_seconds=round(self.grade_seconds, 3),
        )


def starts_together(run: RunRequest) -> bool:
    """Whether the samples of an instance start together as a group, which has a quorum or a
    deadline. Otherwise each starts when there is room for one."""
    is_group = run.quorum is not None or run.group_deadline_s is not None
    return is_group and run.rollouts_each > 1


class Window:
    """Runs instances [start, stop) of a run, `throttle.concurrency` rollouts at a time.

    A failure that only a user can fix (configuration, quota) pauses the window, so that it does not
    fail every later rollout.
    """

    def __init__(self, run: RunRequest, throttle: Throttle, page: ChildrenPage) -> None:
        self.run = run
        """May be replaced during `play`. Rollouts that start later use the new request."""
        self.throttle = throttle
        self.page = page
        self.counts = Counts()
        self.open_children = OpenChildren()
        self.times = RecordedTimes()
        self.is_closed = False
        """Whether the run ended without the rollouts that are still open."""
        self.nothing_left_to_start = False

    async def play(self, start: int, stop: int) -> None:
        tasks: set[asyncio.Task[None]] = set()
        self.page.show()
        try:
            async for request in self._requests(start, stop):
                weight = request.n_samples if isinstance(request, GroupRequest) else 1
                await workflow.wait_condition(
                    lambda weight=weight: self._starts_no_more() or self._has_room(weight)  # type: ignore[misc]
                )
                if self._starts_no_more():
                    break
                if self._is_dropped(request) or self._is_too_late(request):
                    continue
                self.counts.started += weight
                self.counts.running += weight
                task = asyncio.create_task(self._play(request, weight))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            self.nothing_left_to_start = True
            await workflow.wait_condition(lambda: not tasks or self._starts_no_more())
            if tasks and self._is_spent() and workflow.patched(STOP_AT_BUDGET_PATCH_ID):
                await self.open_children.stop()
            await workflow.wait_condition(lambda: not tasks or self._is_truncated())
            if (truncation := self.throttle.truncation) is not None:
                await self._close(truncation, tasks)
        except ActivityError as error:
            if not is_cancelled_exception(error):  # the list is unreadable: wait for open rollouts
                await workflow.wait_condition(lambda: not tasks)
            raise
        finally:
            left = [] if self.is_closed or is_evicted_from_cache() else list(tasks)
            for task in left:
                task.cancel()
            if left:
                await asyncio.gather(*left, return_exceptions=True)

    def _is_spent(self) -> bool:
        used_up = self.run.budget.used_up(self.counts.tokens, self.counts.dollars)
        return self.throttle.spent or bool(used_up)

    def _is_truncated(self) -> bool:
        return self.throttle.truncation is not None

    def _starts_no_more(self) -> bool:
        return self._is_spent() or self._is_truncated()

    async def _close(self, truncation: Truncation, tasks: set[asyncio.Task[None]]) -> None:
        """Stop all agents and wait for their rollouts until `GRACE_PERIOD_S` after the run's end.
        When the run closes, Temporal requests cancellation of those that are still open."""
        await self.open_children.truncate(truncation)
        last = truncation.ends_at + GRACE_PERIOD_S
        if not await wait_until(
            lambda: not tasks, last, "until the run ends without open rollouts"
        ):
            self.is_closed = True
            self.counts.by_status[STILL_RUNNING] += self.counts.running
            self.counts.running = 0

    def _is_too_late(self, request: RolloutRequest | GroupRequest) -> bool:
        """Whether, by recorded times, the rollouts would not end before the run's deadline."""
        if self.run.ends_at is None:
            return False
        one = request.rollout if isinstance(request, GroupRequest) else request
        expected = self.times.expected_s(one.instance_id)
        return expected is not None and workflow.time() + expected > self.run.ends_at

    def _is_dropped(self, request: RolloutRequest | GroupRequest) -> bool:
        """Whether a change of the run to fewer samples has dropped this rollout."""
        if isinstance(request, GroupRequest) or self.run.again is not None:
            return False
        return request.sample_index >= self.run.n_samples

    def _has_room(self, weight: int) -> bool:
        if self.throttle.paused:
            return False
        running = self.counts.running
        return running == 0 or running + weight <= self.throttle.concurrency

    async def _requests(
        self, start: int, stop: int
    ) -> AsyncIterator[RolloutRequest | GroupRequest]:
        """The rollouts in order, or groups if samples start together."""
        round = self.run.again.round if self.run.again else 0
        for first in range(start, stop, PAGE):
            request = PageRequest(
                run_id=self.run.run_id,
                start=first,
                stop=min(first + PAGE, stop),
                round=round,
                listed=self.run.listed and not round,
            )
            options = activity_options.described(
                activity_options.bookkeeping(), f"instances from {first}"
            )
            page = await run_until_truncated(
                ordered("load_page", request, Page, options), self._is_truncated
            )
            stop_if_cancelled()
            if page is None:
                return
            for entry in page.again:
                yield self._listed(entry)
            for instance in page.instances:
                group = self._group(instance)
                if starts_together(self.run):
                    yield group
                    continue
                for sample in range(group.n_samples):
                    yield group.sample(sample) if group.n_samples > 1 else group.rollout

    def _group(self, instance: str) -> GroupRequest:
        return GroupRequest(
            rollout=self.run.rollout_request(instance),
            n_samples=self.run.n_samples,
            quorum=self.run.quorum,
            deadline_s=self.run.group_deadline_s,
            stragglers=self.run.stragglers,
        )

    def _listed(self, entry: RolloutAgain) -> RolloutRequest:
        request = self.run.rollout_request(entry.instance, entry.sample_index)
        if self.run.again is None:
            return request
        update = {"round": entry.round, "start_at": self.run.again.start_at}
        return request.model_copy(update=update)

    async def _play(self, request: RolloutRequest | GroupRequest, weight: int) -> None:
        try:
            if self.run.start_jitter_s:
                late = workflow.random().uniform(0, self.run.start_jitter_s)
                if await wait_until(self._is_truncated, workflow.time() + late, "start jitter"):
                    self.counts.started -= weight
                    return
            if isinstance(request, GroupRequest):
                await self._play_group(request)
            else:
                self._count(await play_rollout(request, self.open_children))
        finally:
            if not self.is_closed:
                self.counts.running -= weight

    async def _play_group(self, group: GroupRequest) -> None:
        try:
            child = await workflow.start_child_workflow(
                temporal_names.GROUP,
                group,
                id=group.workflow_id,
                result_type=dict,
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                search_attributes=attributes.of_rollout(group.rollout),
                static_summary=summary_of_group(group),
            )
            result = await self.open_children.result_of(child)
        except (FailureError, asyncio.CancelledError) as error:
            cancelled = is_cancelled_exception(error)
            status = RolloutStatus.CANCELLED if cancelled else RolloutStatus.FAILED
            if self.is_closed:
                return
            # The group has no result. `finish_run` reads from the store how each rollout ended.
            self.counts.done += group.n_samples
            self.counts.by_status[status.value] += group.n_samples
            return
        for episode in result["episodes"]:
            self._count(EpisodeRef.model_validate(episode))
        kept = group.n_samples - len(result["episodes"])
        if kept and not self.is_closed:
            self.counts.by_status[STILL_RUNNING] += kept

    def _pay(self, episode: EpisodeRef) -> None:
        budget, others = self.run.budget, episode.other_tokens
        agent = TokenCounts(
            prompt_tokens=episode.prompt_tokens,
            cached_tokens=episode.cached_tokens,
            sampled_tokens=episode.tokens,
        )
        self.counts.tokens += sum(one.total for one in (agent, *others.values()))
        self.counts.dollars += budget.cost(agent, others)
        if problem := budget.lacks_price_of(others):  # a row may name the model that plays its user
            self.throttle.stop_for(problem)

    def _count(self, episode: EpisodeRef) -> None:
        if self.is_closed:
            return
        self.page.add(episode)
        only_grading = self.run.again is not None and self.run.again.start_at == "grade"
        self.times.add(episode, only_grading=only_grading)
        self.counts.grade_seconds += episode.grade_s
        self.counts.done += 1
        self.counts.by_status[episode.status.value] += 1
        self._pay(episode)
        if episode.outcome is not None:
            self.counts.by_outcome[episode.outcome.value] += 1
        if episode.failure is not None and episode.failure.type in ACTION_NEEDED:
            self.throttle.stop_for(episode.failure.message)
        if (
            self.throttle.fails_like_before(episode)
            and episode.failure is not None
            and not self.nothing_left_to_start
            and not self.throttle.paused
            and workflow.patched(PAUSE_ON_LIKE_FAILURES_PATCH_ID)
        ):
            self.throttle.stop_for(
                f"{ALIKE} rollouts failed the same way: {episode.failure.message}"
            )
