"""CalibrationWorkflow: proves the rows of a dataset before they cost GPU time.

The agents `oracle` and `nop` run each row `runs` times each, as ordinary rollouts. A row that has a
record and a rollout that has a grade do not run again: starting the same request again continues
where the last one stopped.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.client import temporal_names
    from perdure.rollouts.activity_messages import (
        ACTION_NEEDED,
        CalibrationPage,
        CalibrationPart,
        CalibrationRow,
        CalibrationSummary,
        Conclusion,
        PreparedRun,
        RowToConclude,
        RowTwins,
    )
    from perdure.types import CalibrationRequest, EpisodeRef, RolloutRequest, RunStatus
    from workflows import activity_options
    from workflows.activity_redispatch import ordered
    from workflows.child_rollouts import play_rollout
    from workflows.workflow_failures import is_evicted_from_cache, parse, stop_if_cancelled

PAGE = 50
"""Rows that one activity loads."""
MOST_EVENTS = 10_000
"""Events of one history, about 200 rows at three runs. After that, the workflow starts no more
rows, waits for those in flight, and continues as new."""
AGENTS = ("oracle", "nop")
CHOOSING, UNDECIDED = "choosing twins", "undecided"

Result = TypeVar("Result")


@workflow.defn(name=temporal_names.CALIBRATION)
class CalibrationWorkflow:
    """List the rows, run each, conclude on each, report on all."""

    def __init__(self) -> None:
        self.dataset = ""
        self.concluded: dict[str, int] = {}
        self.total = 0
        self.running = 0
        self.choosing = 0
        self.attention = ""

    @workflow.run
    async def run(
        self, request: Any = None, start: int = 0, concluded: dict[str, int] | None = None
    ) -> CalibrationSummary:
        asked = parse(CalibrationRequest, request)
        parse(RolloutRequest, {"run_id": "x", "instance": "any/instance", **asked.rollout})
        self.dataset, self.concluded = asked.dataset, dict(concluded or {})
        if start == 0:
            await self._bookkept("prepare_calibration", asked, PreparedRun, "list the rows")
        stopped_at = await self._play(asked, start)
        if stopped_at is not None and not self.attention:
            workflow.continue_as_new(args=[asked, stopped_at, self.concluded])
        summary: CalibrationSummary = await self._bookkept(
            "report_calibration", asked, CalibrationSummary, "write the report"
        )
        return summary.model_copy(update={"attention": self.attention})

    @workflow.query
    def status(self) -> RunStatus:
        done = sum(self.concluded.values())
        return RunStatus(
            run_id=self.dataset,
            state="attention" if self.attention else "running",
            total=self.total,
            done=done,
            started=done + self.running,
            running=self.running,
            attention=self.attention,
            by_status={CHOOSING: self.choosing} if self.choosing else {},
            by_outcome=self.concluded,
        )

    async def _play(self, asked: CalibrationRequest, start: int) -> int | None:
        """Run the rows from `start` on, each as soon as there is room. Returns the number of the
        first row for which this history is too long, or None."""
        places = asyncio.Semaphore(asked.concurrency)
        tasks: list[asyncio.Task[None]] = []

        def has_room() -> bool:
            done = [task for task in tasks if task.done()]
            for task in done:
                tasks.remove(task)
                task.result()
            return bool(self.attention) or len(tasks) < asked.concurrency

        stopped_at = None
        try:
            async with contextlib.aclosing(self._rows(asked, start)) as rows:
                async for number, row in rows:
                    await workflow.wait_condition(has_room)
                    too_long = workflow.info().get_current_history_length() > MOST_EVENTS
                    if self.attention or (too_long and number > start):
                        stopped_at = number
                        break
                    if row.state:
                        self._count(row.state)
                    else:
                        tasks.append(asyncio.create_task(self._calibrate(asked, row, places)))
            await asyncio.gather(*tasks)
        finally:
            if not is_evicted_from_cache():
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return stopped_at

    async def _rows(
        self, asked: CalibrationRequest, start: int
    ) -> AsyncGenerator[tuple[int, CalibrationRow], None]:
        while True:
            part = CalibrationPart(calibration=asked, start=start, stop=start + PAGE)
            page: CalibrationPage = await self._bookkept(
                "load_calibration_rows", part, CalibrationPage, f"rows from {start}"
            )
            self.total = page.total
            for number, row in enumerate(page.rows, start):
                yield number, row
            start += PAGE
            if len(page.rows) < PAGE:
                return

    async def _calibrate(
        self, asked: CalibrationRequest, row: CalibrationRow, places: asyncio.Semaphore
    ) -> None:
        rollouts = [
            row.rollout(asked, agent, number) for number in range(asked.runs) for agent in AGENTS
        ]
        await asyncio.gather(*(self._rollout(rollout, places) for rollout in rollouts))
        if self.attention:
            return
        self._count(await self._conclude(RowToConclude(calibration=asked, row=row), places))

    async def _conclude(self, row: RowToConclude, places: asyncio.Semaphore) -> str:
        """The row's state. A row without a conclusion or without twins does not stop the others."""
        concluding = self._bookkept("conclude_calibration", row, Conclusion, row.row.instance)
        concluded: Conclusion | None = await _unless_failed(concluding)
        if concluded is None or not concluded.state:
            return UNDECIDED
        if concluded.may_have_twins:
            async with places:  # choosing twins uses a sandbox, like a rollout
                await _unless_failed(self._choose_twins(row))
        return concluded.state

    async def _choose_twins(self, row: RowToConclude) -> None:
        options = activity_options.described(activity_options.choose_twins(), row.row.instance)
        self.choosing += 1
        try:
            await ordered("choose_twins", row, RowTwins, options)
        finally:
            self.choosing -= 1

    async def _rollout(self, rollout: RolloutRequest, places: asyncio.Semaphore) -> None:
        async with places:
            if self.attention:
                return
            self.running += 1
            try:
                self._heed(await play_rollout(rollout))
            finally:
                self.running -= 1
            stop_if_cancelled()

    def _heed(self, episode: EpisodeRef) -> None:
        """End the calibration at a failure that only a user can fix, which would fail every row."""
        if episode.failure is not None and episode.failure.type in ACTION_NEEDED:
            self.attention = episode.failure.message

    def _count(self, state: str) -> None:
        self.concluded[state] = self.concluded.get(state, 0) + 1

    async def _bookkept(self, name: str, argument: Any, result: type[Any], summary: str) -> Any:
        options = activity_options.described(activity_options.bookkeeping(), summary)
        done = await ordered(name, argument, result, options)
        stop_if_cancelled()
        return done


async def _unless_failed(activity: Awaitable[Result]) -> Result | None:
    """None if the activity has failed for good. A cancellation is not a failure."""
    try:
        return await activity
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        return None
