"""RunWorkflow: a set of instances x n samples under one config.

A small run starts its rollouts itself. A large run is cut into shards of 500 instances, each small enough
to need no continue-as-new. That would have to restore state and to find lost children, and would cost 7.7
events per child instead of 4.7. A shard starts when the previous one has started all its rollouts. It gets
the part of the run's concurrency that older shards do not use.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    FailureError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from perdure.client import search_attribute_keys as attributes
    from perdure.client import temporal_names
    from perdure.errors import ConfigurationError
    from perdure.rollouts.activity_messages import (
        PreparedRun,
        ShardRequest,
        Truncation,
    )
    from perdure.types import (
        MISSING,
        Budget,
        EndedBy,
        RolloutRequest,
        RolloutStatus,
        RunRequest,
        RunStatus,
        RunSummary,
    )
    from workflows import activity_options, web_ui_markdown
    from workflows.activity_redispatch import ordered
    from workflows.rollouts_in_flight import STILL_RUNNING, Counts, Window, starts_together
    from workflows.run_deadline import (
        MANIFEST_S,
        deadline_truncation,
        run_until_truncated,
        stop_at_truncation,
        stop_margin_s,
        stop_time,
        wait_until,
    )
    from workflows.run_pause import Throttle
    from workflows.web_ui import ChildrenPage, Links, ShardsPage, counted
    from workflows.workflow_failures import (
        as_sentence,
        changed,
        check_own_id,
        is_evicted_from_cache,
        parse,
        refused,
        stop_if_cancelled,
        to_the_end,
    )

SHARD = 500
"""Children per shard: about 2,400 history events, far below the server's limits."""

Shard = workflow.ChildWorkflowHandle["RunShardWorkflow", RunStatus]
Value = TypeVar("Value")
RECORD_CHANGES_PATCH_ID = "records-changes"
CHANGES_AFTER_LIST_PATCH_ID = "changes-after-the-list"
UNFINISHED = (RolloutStatus.TRUNCATED.value, STILL_RUNNING, MISSING)
"""States of rollouts without which a run may end."""
LEAST_S = 0.001
"""Seconds between the times of two changes, so that they differ. Workflow time may not advance."""


@workflow.defn(name=temporal_names.RUN)
class RunWorkflow:
    """Lists the instances, runs them, writes the manifest. Updates pause, resume and resize it."""

    def __init__(self) -> None:
        self.run_id = ""
        self.state = "starting"
        self.total = 0
        paused, attention = workflow.memo_value(temporal_names.PAUSED, (False, ""))
        self.throttle = Throttle(paused=paused, attention=attention)
        self.request: RunRequest | None = None
        """The request, with all changes so far."""
        self.instances = 0
        self.is_listed = False
        """Whether the instances are known."""
        self.window: Window | None = None
        self.shards: dict[int, Shard] = {}
        """The open shards. Only the newest has rollouts left to start."""
        self.newest, self.told = 0, 0
        """The newest shard, and the concurrency it was last told."""
        self.reports: dict[int, RunStatus] = {}
        """The last report of each shard."""
        self.summary: RunSummary | None = None
        self.page: ShardsPage | None = None
        """Set only for a run that is cut into shards."""
        self.deadline_watch: asyncio.Task[None] | None = None
        started = workflow.info().start_time.timestamp()
        self.began: float = workflow.memo_value(temporal_names.BEGAN, started)

    @workflow.run
    async def run(self, request: Any = None) -> RunSummary:
        run = self._with_deadline(parse(RunRequest, request), workflow.time())
        check_own_id(run.workflow_id)
        probe = {"run_id": run.run_id, "instance": "any/instance", **run.rollout}
        parse(RolloutRequest, probe)  # refuses a wrong field before anything starts
        self.run_id, self.throttle.concurrency = run.run_id, run.concurrency
        self.request = run
        self.deadline_watch = asyncio.create_task(self._watch_deadline())
        if not attributes.are_set(workflow.info().typed_search_attributes):
            workflow.upsert_search_attributes([attributes.RUN.value_set(run.run_id)])
        try:
            options = activity_options.described(
                activity_options.bookkeeping(), "list the instances"
            )
            listing = ordered("prepare_run", run, PreparedRun, options)
            prepared = await run_until_truncated(listing, self._is_truncated)
        except asyncio.CancelledError:
            # The list may be done: its completion can arrive together with the cancellation.
            await to_the_end(self._finish(run))
            raise
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            raise as_sentence(error) from error
        self.is_listed = prepared is not None
        prepared = prepared or PreparedRun(total=0)
        self.instances = prepared.total
        self.total = prepared.total * self.request.rollouts_each
        self.state = "running"
        try:
            stop_if_cancelled()
            if prepared.total <= _shard_size(run):
                self.window = Window(
                    self.request, self.throttle, ChildrenPage(*_page(run, self.total))
                )
                await self.window.play(0, prepared.total)
            else:
                self.page = ShardsPage(*_page(run, self.total))
                self._show()
                await self._play_shards(run, prepared.total)
        except GeneratorExit:  # this worker evicts the workflow, which continues elsewhere
            raise
        except BaseException:
            await to_the_end(self._finish(run))
            raise
        if self._leaves_rollouts_unstarted(run):
            assert self.request.ends_at is not None, "it has a deadline"
            self.throttle.truncation = deadline_truncation(self.request.ends_at)
        if self._has_more_to_play(run):
            await workflow.wait_condition(workflow.all_handlers_finished)
            paused = (self.throttle.paused, self.throttle.attention)
            memo = {
                **workflow.memo(),
                temporal_names.PAUSED: paused,
                temporal_names.BEGAN: self.began,
            }
            workflow.continue_as_new(self._rest(run), memo=memo)
        summary = await to_the_end(self._finish(run))
        await workflow.wait_condition(workflow.all_handlers_finished)
        return summary

    @workflow.query
    def status(self) -> RunStatus:
        summary, concurrency = self.summary, self.throttle.concurrency
        if summary is not None:
            counts = _counts_of(summary)
            done = counts.status(summary.run_id, self.state, summary.rollouts, concurrency)
            ended = {"stopped": summary.stopped, "stopped_by": summary.stopped_by}
            return done.model_copy(update=ended)
        attentions = [self.throttle.attention, *(r.attention for r in self.reports.values())]
        attention = next(filter(None, attentions), "")
        state = self.state
        if state == "running" and (self.throttle.paused or attention):
            state = "attention" if attention else "paused"
        status = self._counts().status(self.run_id, state, self.total, concurrency, attention)
        ends_at = self.request.ends_at if self.request is not None else None
        stops = {"stopped": self._why_stopped(), "stopped_by": self._ended_by(), "ends_at": ends_at}
        return status.model_copy(update=stops)

    def _is_truncated(self) -> bool:
        return self.throttle.truncation is not None

    def _ended_by(self) -> EndedBy | None:
        if (truncation := self.throttle.truncation) is not None:
            return truncation.by
        return "budget" if self._used_up() else None

    def _why_stopped(self) -> str:
        """Why the run starts no more rollouts, in words; empty if it does."""
        truncation, run = self.throttle.truncation, self.request
        if truncation is None or run is None:
            return self._used_up()
        if truncation.by == "stop_at":
            return f"{run.stop_at or 1:.4g} of its rollouts had ended (stop_at)"
        deadline = timedelta(seconds=run.deadline_s or 0)
        if run.ends_at is not None and workflow.time() < run.ends_at:
            return f"its deadline of {deadline} leaves no time for another rollout"
        return f"its deadline of {deadline} has passed"

    def _with_deadline(self, run: RunRequest, asked_at: float) -> RunRequest:
        """The request with the fields that the workflow sets."""
        ends_at = None if run.deadline_s is None else self.began + run.deadline_s
        own = {"asked_at": asked_at, "ends_at": ends_at, "stopped": ""}
        return run.model_copy(update=own)

    async def _watch_deadline(self) -> None:
        """Stop all rollouts shortly before the deadline, or when `stop_at` is reached."""
        while self.throttle.truncation is None:
            run = self.request
            assert run is not None, "it was set before"
            stops_at = self._stops_at(run)
            if stops_at is not None and run.ends_at is not None and workflow.time() >= stops_at:
                return await self._truncate(deadline_truncation(run.ends_at))
            if self._is_share_reached():
                counts = self._counts()
                left = stop_margin_s(run, counts.graded, counts.grade_seconds)
                return await self._truncate(stop_at_truncation(run, workflow.time() + left))

            def has_changed(run: RunRequest = run) -> bool:
                return self.request is not run or self._is_share_reached()

            if stops_at is None:
                await workflow.wait_condition(has_changed)
            else:
                await wait_until(has_changed, stops_at, "until the agents stop for the deadline")

    def _stops_at(self, run: RunRequest) -> float | None:
        counts = self._counts()
        return stop_time(run, workflow.time(), counts.graded, counts.grade_seconds)

    def _is_share_reached(self) -> bool:
        """Whether `stop_at` ends the run before its last rollouts."""
        run = self.request
        if run is None or run.stop_at is None:
            return False
        return math.ceil(run.stop_at * self.total) <= self._counts().done < self.total

    async def _truncate(self, truncation: Truncation) -> None:
        self.throttle.truncation = truncation
        for shard in list(self.shards.values()):
            await _signal(shard, RunShardWorkflow.truncate, truncation)

    def _used_up(self) -> str:
        """Says that the budget is used up, with figures; empty if it is not."""
        counts = self._counts()
        budget = self.request.budget if self.request is not None else Budget()
        return budget.used_up(counts.tokens, counts.dollars)

    def _has_more_to_play(self, began: RunRequest) -> bool:
        """Whether a change added instances, or came too late for instances that have fewer samples or
        that the old budget stopped."""
        now = self.request
        if now is None or now is began or self.state == "finishing" or self._is_truncated():
            return False
        was_stopped = self._starts_less() and not self._used_up()
        return _is_larger(now, began) or was_stopped

    def _rest(self, began: RunRequest) -> RunRequest:
        """The request of the next execution, which finds finished rollouts in the store."""
        now = self.request or began
        return now.model_copy(update={"again": None}) if _is_larger(now, began) else now

    def _leaves_rollouts_unstarted(self, began: RunRequest) -> bool:
        """Whether the rollouts that have not started would not end before the deadline."""
        now = self.request
        if now is None or now.ends_at is None or self._is_truncated():
            return False
        is_later = began.ends_at is not None and now.ends_at > began.ends_at
        if _is_larger(now, began) or is_later:
            return False  # a change that came too late for them: they start in the next execution
        return self._starts_less() and not self._used_up()

    def _starts_less(self) -> bool:
        counts = self._counts()
        return counts.started < self.total

    @workflow.update
    async def pause(self) -> RunStatus:
        """Start no new rollouts. Those in flight continue."""
        return await self._set_paused(True)

    @workflow.update
    async def resume(self) -> RunStatus:
        return await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> RunStatus:
        self.throttle.set_paused(paused)
        for shard in list(self.shards.values()):
            await _signal(shard, RunShardWorkflow.set_paused, paused)
        return self.status()

    @workflow.update
    async def resize(self, concurrency: Any) -> RunStatus:
        """Change the maximum number of rollouts in flight. The argument is decoded as `Any`,
        because the converter's error for another type is not readable."""
        if workflow.patched(RECORD_CHANGES_PATCH_ID):
            return await self._change({"concurrency": concurrency})
        self.throttle.concurrency = concurrency
        await self._tell_room()
        return self.status()

    @workflow.update
    async def change(self, fields: Any) -> RunStatus:
        """Change samples, budget, concurrency, quorum or deadline: `fields` are of RunRequest. Added
        instances start when the others have ended."""
        return await self._change(fields)

    async def _change(self, fields: Any) -> RunStatus:
        await workflow.wait_condition(lambda: self.request is not None)
        if self.state == "starting" and workflow.patched(CHANGES_AFTER_LIST_PATCH_ID):
            # The activity that lists the instances records the first request, before any change.
            await workflow.wait_condition(lambda: self.state != "starting")
        before = self.request
        assert before is not None, "it was waited for"
        if self.state == "finishing" or self._is_truncated():
            why = f"run {self.run_id} is ending: change it when it has ended"
            raise ApplicationError(why, type=temporal_names.ENDING, non_retryable=True)
        asked_at = max(workflow.time(), before.asked_at + LEAST_S)
        after = changed(before, fields)
        try:
            before.check_keeps_instances(after)
        except ConfigurationError as error:
            raise refused(str(error)) from None
        self.request = self._with_deadline(after, asked_at)
        if not before.changes_to(self.request):
            return self.status()
        self._follow(self.request)
        for shard in list(self.shards.values()):
            await _signal(shard, RunShardWorkflow.set_run, self.request)
        await self._tell_room()
        options = activity_options.described(activity_options.bookkeeping(), "record a change")
        await ordered("record_change", self.request, type(None), options)
        workflow.upsert_memo({temporal_names.CHANGED: self.request.changeable()})
        return self.status()

    def _follow(self, run: RunRequest) -> None:
        self.throttle.concurrency = run.concurrency
        self.total = self.instances * run.rollouts_each
        if self.window is not None:
            self.window.run = run
        self._show()

    @resize.validator
    def _concurrency_is_sane(self, concurrency: Any) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= 2000:
            raise ValueError("resize takes a whole number from 1 to 2000, such as --input 32")

    @workflow.signal
    async def shard_report(self, shard: int, report: RunStatus) -> None:
        self.reports[shard] = report
        self._show()
        await self._tell_room()
        if self._used_up() and not self.throttle.spent:
            self.throttle.spent = True
            for other in list(self.shards.values()):
                await _signal(other, RunShardWorkflow.set_spent, True)

    def _show(self) -> None:
        if self.page is not None:
            self.page.show(counted(self.status()), self.reports)

    async def _finish(self, run: RunRequest) -> RunSummary:
        self.state = "finishing"
        if self.deadline_watch is not None:
            self.deadline_watch.cancel()
        options = activity_options.described(activity_options.bookkeeping(), "write the manifest")
        ended = run.model_copy(
            update={"stopped": self._why_stopped() if self._is_truncated() else ""}
        )
        writing = asyncio.create_task(
            ordered("finish_run", ended, RunSummary, options, cleaning=True)
        )
        if (truncation := self.throttle.truncation) is not None:
            last = max(workflow.time(), truncation.ends_at) + MANIFEST_S
            await wait_until(writing.done, last, "until the run ends without its manifest")
            if not writing.done():  # the store is down, and its counts are not known
                nothing = RunSummary(run_id=self.run_id, uri="", rollouts=0)
                self.summary = self._with_all(
                    nothing.model_copy(update={"by_status": self._counts().by_status})
                )
                return self.summary
        self.summary = self._with_all(await writing)
        return self.summary

    def _with_all(self, summary: RunSummary) -> RunSummary:
        """Add the planned rollouts without an episode to the store's counts."""
        counted = self._counts().by_status
        by_status = dict(summary.by_status)
        left = self.total - sum(by_status.values())
        # The others never started: the run was cancelled, or its budget or its time is used up.
        unstarted = MISSING if self._is_truncated() else RolloutStatus.CANCELLED.value
        for status in (RolloutStatus.FAILED.value, STILL_RUNNING, unstarted):
            more = counted[status] - by_status.get(status, 0)
            n = left if status == unstarted else min(more, left)
            if n > 0:
                by_status[status] = by_status.get(status, 0) + n
                left -= n
        rollouts = max(self.total, summary.rollouts)
        found: dict[str, Any] = {"rollouts": rollouts, "by_status": by_status}
        is_unfinished = not self.is_listed or any(by_status.get(one) for one in UNFINISHED)
        if is_unfinished or not self._is_truncated():
            found |= {"stopped": self._why_stopped(), "stopped_by": self._ended_by()}
        return summary.model_copy(update=found)

    def _counts(self) -> Counts:
        here = [self.window.counts] if self.window is not None else []
        return Counts.of([*here, *self.reports.values()])

    async def _play_shards(self, run: RunRequest, total: int) -> None:
        tasks: list[asyncio.Task[None]] = []
        size = _shard_size(run)
        together = run.n_samples if starts_together(run) else 1
        for shard, start in enumerate(range(0, total, size)):
            self.newest = shard
            await workflow.wait_condition(
                lambda: self._starts_no_more(tasks) or self._has_room(together)
            )
            if self._starts_no_more(tasks):
                break
            task = asyncio.create_task(
                self._play_shard(run, shard, start, min(start + size, total))
            )
            tasks.append(task)
            await workflow.wait_condition(
                lambda shard=shard, task=task: task.done() or self._has_started_all(shard)  # type: ignore[misc]
            )
        await asyncio.gather(*tasks, return_exceptions=True)  # let the other shards finish
        for task in tasks:
            task.result()

    async def _play_shard(self, run: RunRequest, shard: int, start: int, stop: int) -> None:
        self.told = max(1, self._room())
        request = ShardRequest(
            run=self.request or run,
            start=start,
            stop=stop,
            concurrency=self.told,
            paused=self.throttle.paused,
        )
        handle = await workflow.start_child_workflow(
            RunShardWorkflow.run,
            args=[request, shard],
            id=f"{workflow.info().workflow_id}/shard/{shard}",
            parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
            static_summary=f"instances {start} to {stop}",
        )
        self.shards[shard] = handle
        try:
            await self._catch_up(handle, request)
            self.reports[shard] = await handle
            self._show()
        finally:
            del self.shards[shard]
        await self._tell_room()

    async def _catch_up(self, shard: Shard, request: ShardRequest) -> None:
        """Signal the changes that arrived while the shard was being started."""
        if request.paused != self.throttle.paused:
            await _signal(shard, RunShardWorkflow.set_paused, self.throttle.paused)
        if self.request is not None and self.request is not request.run:
            await _signal(shard, RunShardWorkflow.set_run, self.request)
        if self.throttle.truncation is not None:
            await _signal(shard, RunShardWorkflow.truncate, self.throttle.truncation)
        await self._tell_room()
        stop_if_cancelled()  # awaiting the signals may have used up the cancellation

    def _starts_no_more(self, tasks: list[asyncio.Task[None]]) -> bool:
        """Whether the budget or the time is used up or a shard has failed."""
        ended = [task for task in tasks if task.done()]
        if self.throttle.spent or self._is_truncated():
            return True
        return any(task.cancelled() or task.exception() for task in ended)

    def _room(self) -> int:
        """Rollouts that the newest shard may have in flight: the concurrency that older ones
        leave."""
        older = self.shards.keys() & self.reports.keys() - {self.newest}
        return self.throttle.concurrency - sum(self.reports[shard].running for shard in older)

    def _has_room(self, together: int) -> bool:
        return self._room() >= min(together, self.throttle.concurrency)

    async def _tell_room(self) -> None:
        room = max(1, self._room())
        if room != self.told and (shard := self.shards.get(self.newest)) is not None:
            self.told = room
            await _signal(shard, RunShardWorkflow.set_concurrency, room)

    def _has_started_all(self, shard: int) -> bool:
        report = self.reports.get(shard)
        return report is not None and report.started >= report.total


@workflow.defn(name=temporal_names.SHARD)
class RunShardWorkflow:
    """Runs instances [start, stop) of a large run and reports to its parent."""

    @workflow.init
    def __init__(self, request: ShardRequest, shard: int) -> None:
        # Set here, because a signal may arrive with the first workflow task.
        self.throttle = Throttle(request.concurrency, request.paused)
        self.start, self.stop = request.start, request.stop
        self.total = (self.stop - self.start) * request.run.rollouts_each
        page = ChildrenPage(*_page(request.run, self.total))
        self.window = Window(request.run, self.throttle, page)
        self.reported_done = 0
        self.reported_all_started = False
        self.reported_attention = ""

    @workflow.run
    async def run(self, request: ShardRequest, shard: int) -> RunStatus:
        playing = asyncio.create_task(self.window.play(request.start, request.stop))
        try:
            await self._report(shard, playing)
            await playing
        finally:
            if not is_evicted_from_cache():
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
        return self._status()

    @workflow.signal
    def set_paused(self, paused: bool) -> None:
        self.throttle.set_paused(paused)

    @workflow.signal
    def set_run(self, run: RunRequest) -> None:
        self.window.run = run
        self.total = (self.stop - self.start) * run.rollouts_each

    @workflow.signal
    def set_spent(self, spent: bool) -> None:
        self.throttle.spent = spent

    @workflow.signal(name=temporal_names.TRUNCATE)
    def truncate(self, truncation: Truncation) -> None:
        self.throttle.truncation = truncation

    @workflow.signal
    def set_concurrency(self, concurrency: int) -> None:
        self.throttle.concurrency = concurrency

    async def _report(self, shard: int, playing: asyncio.Task[None]) -> None:
        """Report to the parent at every 5 % of the shard and when all its rollouts have started.
        After that, report whenever a fifth of those in flight has ended, so that the next shard can
        start more."""
        parent = workflow.info().parent
        assert parent is not None, "shards are children of a run"
        handle = workflow.get_external_workflow_handle(parent.workflow_id)
        while not playing.done():
            await workflow.wait_condition(lambda: playing.done() or self._has_news())
            self.reported_done = self.window.counts.done
            self.reported_all_started = self.window.nothing_left_to_start
            self.reported_attention = self.throttle.attention
            await handle.signal("shard_report", args=[shard, self._status()])
            stop_if_cancelled()

    def _has_news(self) -> bool:
        counts, all_started = self.window.counts, self.window.nothing_left_to_start
        if self.throttle.attention != self.reported_attention:
            return True
        if all_started and not self.reported_all_started:
            return True
        step = counts.running // 5 if all_started else self.total // 20
        return counts.done - self.reported_done >= max(1, step)

    def _status(self) -> RunStatus:
        state = "paused" if self.throttle.paused else "running"
        return self.window.counts.status(
            self.window.run.run_id,
            state,
            self.total,
            self.throttle.concurrency,
            self.throttle.attention,
        )


def _is_larger(now: RunRequest, began: RunRequest) -> bool:
    """Whether a change added samples or instances."""
    return now.n_samples > began.n_samples or now.choice != began.choice


def _shard_size(run: RunRequest) -> int:
    """Instances per shard."""
    children_each = 1 if starts_together(run) else run.rollouts_each
    return max(1, SHARD // children_each)


def _page(run: RunRequest, total: int) -> tuple[str, str, int, Links]:
    """The constructor arguments of a page for `total` rollouts of this run."""
    agent, links = web_ui_markdown.quoted(run.rollout_request("any/instance").agent), Links.here()
    headline = (
        f"**{web_ui_markdown.escaped(run.run_id)}** · {total} rollouts · agent {agent}"
        f" · `perdure report {run.run_id}`\n\nRollouts: {links.rollout_lists(run.run_id)}"
        f" · stuck ones: `perdure status {run.run_id} --stuck`"
    )
    return run.run_id, headline, total, links


async def _signal(
    shard: Shard, signal: Callable[["RunShardWorkflow", Value], None], value: Value
) -> None:
    with contextlib.suppress(FailureError):  # the shard has ended
        await shard.signal(signal, value)


def _counts_of(summary: RunSummary) -> Counts:
    running = summary.by_status.get(STILL_RUNNING, 0)
    return Counts(
        started=summary.rollouts,
        done=summary.rollouts - running,
        running=running,
        by_status=Counter(summary.by_status),
        by_outcome=Counter(summary.by_outcome),
    )
