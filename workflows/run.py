"""RunWorkflow: a set of instances x n samples under one config.

A small run plays its instances itself. A large one is cut into shards, each small enough to need
no continue-as-new (docs/decisions/0004-runs-are-sharded.md); a shard starts when the one before it
has nothing left to start.
"""

import asyncio
import contextlib
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from perdure.client import names
    from perdure.client import search_attributes as attributes
    from perdure.rollouts.messages import PreparedRun, RunStatus, RunSummary, ShardRequest
    from perdure.types import RolloutRequest, RolloutStatus, RunRequest
    from workflows import policies
    from workflows.failures import parse, stop_if_cancelled, was_dropped
    from workflows.window import STILL_RUNNING, Window

SHARD = 500
"""Instances of one shard: about 2,400 history events, far below the server's limits."""


@workflow.defn(name=names.RUN)
class RunWorkflow:
    """Prepares the list, plays it, writes the manifest. Pause, resume, resize by update."""

    def __init__(self) -> None:
        self.run_id = ""
        self.state = "starting"
        self.total = 0
        self.window: Window | None = None
        self.shards: dict[int, workflow.ChildWorkflowHandle[Any, Any]] = {}
        self.reports: dict[int, RunStatus] = {}
        self.paused = False
        self.concurrency = 0
        self.summary: RunSummary | None = None

    @workflow.run
    async def run(self, request: Any = None) -> RunSummary:
        run = parse(RunRequest, request)
        probe = {"run_id": run.run_id, "instance": "any/instance", **run.rollout}
        parse(RolloutRequest, probe)  # a wrong field is refused before anything starts
        self.run_id, self.concurrency = run.run_id, run.concurrency
        if not attributes.are_set(workflow.info().typed_search_attributes):
            workflow.upsert_search_attributes([attributes.RUN.value_set(run.run_id)])
        prepared = await workflow.execute_activity(
            "prepare_run",
            run,
            result_type=PreparedRun,
            **policies.described(policies.bookkeeping(), "list the instances"),
        )
        self.total = prepared.total * run.n_samples
        self.state = "running"
        workflow.set_current_details(f"**{run.run_id}** · {self.total} rollouts · `{prepared.uri}`")
        try:
            stop_if_cancelled()
            if prepared.total <= SHARD:
                await self._play_here(run, prepared.total)
            else:
                await self._play_shards(run, prepared.total)
        except GeneratorExit:  # its worker dropped it: there is nobody left to ask
            raise
        except BaseException:
            await self._finish(run)
            raise
        summary = await self._finish(run)
        await workflow.wait_condition(workflow.all_handlers_finished)
        return summary

    async def _finish(self, run: RunRequest) -> RunSummary:
        self.state = "finishing"
        summary: RunSummary = await workflow.execute_activity(
            "finish_run",
            run,
            result_type=RunSummary,
            **policies.described(policies.bookkeeping(), "write the manifest"),
        )
        self.summary = self._with_all(summary)
        return self.summary

    def _with_all(self, summary: RunSummary) -> RunSummary:
        """The store's counts, and every planned rollout that left no episode there."""
        counted = _add(r.by_status for r in self._reports())
        by_status = dict(summary.by_status)
        left = self.total - sum(by_status.values())
        for status in (RolloutStatus.FAILED.value, STILL_RUNNING, RolloutStatus.CANCELLED.value):
            more = counted.get(status, 0) - by_status.get(status, 0)
            # Whatever is left at last was never started: the run was cancelled before.
            n = left if status == RolloutStatus.CANCELLED else min(more, left)
            if n > 0:
                by_status[status] = by_status.get(status, 0) + n
                left -= n
        rollouts = max(self.total, summary.rollouts)
        return summary.model_copy(update={"rollouts": rollouts, "by_status": by_status})

    def _reports(self) -> list[RunStatus]:
        here = [_report(self.run_id, self.window)] if self.window is not None else []
        return here + list(self.reports.values())

    @workflow.query
    def status(self) -> RunStatus:
        reports = self._reports()
        attention = next((r.attention for r in reports if r.attention), "")
        state = self.state
        if state == "running" and (self.paused or attention):
            state = "attention" if attention else "paused"
        if self.summary is not None:
            return _final(self.summary, state, self.concurrency)
        return RunStatus(
            run_id=self.run_id,
            state=state,
            total=self.total,
            started=sum(r.started for r in reports),
            done=sum(r.done for r in reports),
            running=sum(r.running for r in reports),
            concurrency=self.concurrency,
            attention=attention,
            by_status=_add(r.by_status for r in reports),
            by_outcome=_add(r.by_outcome for r in reports),
        )

    @workflow.update
    async def pause(self) -> RunStatus:
        """Start no new rollouts; those in flight go on."""
        self.paused = True
        await self._tell("set_paused", True)
        return self.status()

    @workflow.update
    async def resume(self) -> RunStatus:
        self.paused = False
        await self._tell("set_paused", False)
        return self.status()

    @workflow.update
    async def resize(self, concurrency: int) -> RunStatus:
        """Rollouts in flight at most, from now on."""
        self.concurrency = concurrency
        await self._tell("set_concurrency", concurrency)
        return self.status()

    @resize.validator
    def _concurrency_is_sane(self, concurrency: int) -> None:
        if not 1 <= concurrency <= 2000:
            raise ValueError("concurrency must be between 1 and 2000")

    @workflow.signal
    def shard_report(self, shard: int, report: RunStatus) -> None:
        self.reports[shard] = report

    async def _play_here(self, run: RunRequest, total: int) -> None:
        self.window = Window(run, self.concurrency)
        self.window.paused = self.paused
        await self.window.play(0, total)

    async def _play_shards(self, run: RunRequest, total: int) -> None:
        tasks: list[asyncio.Task[None]] = []
        for shard, start in enumerate(range(0, total, SHARD)):
            task = asyncio.create_task(
                self._play_shard(run, shard, start, min(start + SHARD, total))
            )
            tasks.append(task)
            await workflow.wait_condition(
                lambda shard=shard, task=task: task.done() or self._is_drained(shard)  # type: ignore[misc]
            )
            if self._is_drained(shard):
                continue
            # It ended without its last report, and will send none. Runs from before this wait on.
            if workflow.patched("a-lost-shard-ends-its-run"):
                task.result()
            else:
                await workflow.wait_condition(lambda shard=shard: self._is_drained(shard))  # type: ignore[misc]
        await asyncio.gather(*tasks)

    async def _play_shard(self, run: RunRequest, shard: int, start: int, stop: int) -> None:
        request = ShardRequest(
            run=run, start=start, stop=stop, concurrency=self.concurrency, paused=self.paused
        )
        handle = await workflow.start_child_workflow(
            names.SHARD,
            args=[request, shard],
            id=f"{workflow.info().workflow_id}/shard/{shard}",
            result_type=RunStatus,
            parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
            static_summary=f"instances {start} to {stop}",
        )
        self.shards[shard] = handle
        try:
            await self._catch_up(handle, request)
            self.reports[shard] = await handle
        finally:
            del self.shards[shard]

    async def _catch_up(
        self, handle: workflow.ChildWorkflowHandle[Any, Any], told: ShardRequest
    ) -> None:
        """What was said while the shard was being started, it has not heard."""
        missed = (told.paused, told.concurrency) != (self.paused, self.concurrency)
        if missed and workflow.patched("a-shard-hears-what-it-missed"):
            await _say(handle, "set_paused", self.paused)
            await _say(handle, "set_concurrency", self.concurrency)
            stop_if_cancelled()  # a signal that is sent takes the request with it

    def _is_drained(self, shard: int) -> bool:
        """Nothing left to start there, and at most a tenth of the window still in flight."""
        report = self.reports.get(shard)
        return (
            report is not None
            and report.started >= report.total
            and report.running <= self.concurrency // 10
        )

    async def _tell(self, signal: str, value: Any) -> None:
        if self.window is not None:
            if signal == "set_concurrency":
                self.window.resize(value)
            elif value:
                self.window.pause()
            else:
                self.window.resume()
        for handle in list(self.shards.values()):
            await _say(handle, signal, value)


@workflow.defn(name=names.SHARD)
class RunShardWorkflow:
    """Instances [start, stop) of a large run; reports to its parent as it goes."""

    def __init__(self) -> None:
        self.window: Window | None = None
        self.paused: bool | None = None
        self.concurrency: int | None = None
        self.told = 0
        self.told_attention = ""

    @workflow.run
    async def run(self, request: ShardRequest, shard: int) -> RunStatus:
        self.window = window = Window(request.run, self.concurrency or request.concurrency)
        window.paused = request.paused if self.paused is None else self.paused
        playing = asyncio.create_task(window.play(request.start, request.stop))
        total = (request.stop - request.start) * request.run.n_samples
        try:
            await self._report(window, shard, total, playing)
            await playing
        finally:
            if not was_dropped():
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
        return _report(request.run.run_id, window, total)

    @workflow.signal
    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        if self.window is not None and paused:
            self.window.pause()
        elif self.window is not None:
            self.window.resume()

    @workflow.signal
    def set_concurrency(self, concurrency: int) -> None:
        self.concurrency = concurrency
        if self.window is not None:
            self.window.resize(concurrency)

    async def _report(
        self, window: Window, shard: int, total: int, playing: asyncio.Task[None]
    ) -> None:
        """Tell the parent at every 5 % of the shard, and at each completion of its tail."""
        parent = workflow.info().parent
        assert parent is not None, "shards are children of a run"
        handle = workflow.get_external_workflow_handle(parent.workflow_id)
        step = max(1, total // 20)
        while not playing.done():
            await workflow.wait_condition(lambda: playing.done() or self._news(window, step))
            self.told, self.told_attention = window.done, window.attention
            report = _report(window.run.run_id, window, total)
            await handle.signal("shard_report", args=[shard, report])
            stop_if_cancelled()

    def _news(self, window: Window, step: int) -> bool:
        if window.attention != self.told_attention:
            return True
        return window.done - self.told >= (1 if window.nothing_left_to_start else step)


async def _say(
    handle: workflow.ChildWorkflowHandle[Any, Any], signal: str, value: bool | int
) -> None:
    with contextlib.suppress(FailureError):  # it has ended meanwhile
        await handle.signal(signal, value)


def _report(run_id: str, window: Window, total: int = 0) -> RunStatus:
    return RunStatus(
        run_id=run_id,
        state="paused" if window.paused else "running",
        total=total,
        started=window.started,
        done=window.done,
        running=window.in_flight,
        concurrency=window.concurrency,
        attention=window.attention,
        by_status=dict(window.by_status),
        by_outcome=dict(window.by_outcome),
    )


def _final(summary: RunSummary, state: str, concurrency: int) -> RunStatus:
    running = summary.by_status.get(STILL_RUNNING, 0)
    return RunStatus(
        run_id=summary.run_id,
        state=state,
        total=summary.rollouts,
        started=summary.rollouts,
        done=summary.rollouts - running,
        running=running,
        concurrency=concurrency,
        by_status=summary.by_status,
        by_outcome=summary.by_outcome,
    )


def _add(counts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for key, value in count.items():
            total[key] = total.get(key, 0) + value
    return total
