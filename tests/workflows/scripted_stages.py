"""Stand-ins for the activities, replaced by name, with the real workflows on a real server."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.activity_decorator import GRACE
from perdure.client import temporal_names
from perdure.rollouts.activity_messages import (
    AgentRun,
    Attempt,
    Booted,
    CalibrationPage,
    CalibrationPart,
    CalibrationRow,
    CalibrationSummary,
    Captured,
    Conclusion,
    Ending,
    GradedPatch,
    Page,
    PageRequest,
    PreparedRun,
    RowToConclude,
    RowTwins,
    Term,
)
from perdure.types import (
    AgentEnd,
    CalibrationRequest,
    EpisodeRef,
    Outcome,
    RolloutStatus,
    RunRequest,
    RunSummary,
)
from workers.workflow_worker import checking_runner, workflow_worker

QUEUES = (
    *(
        temporal_names.BOOT_QUEUE,
        temporal_names.AGENT_QUEUE,
        temporal_names.GRADE_QUEUE,
        temporal_names.IO_QUEUE,
    ),
    *(temporal_names.host_queue("host-1"), temporal_names.upkeep_queue("host-1")),
)
HEARD_WITHIN = timedelta(seconds=0.2)
"""Seconds within which a stage with heartbeats learns of its cancellation. The timeout stays long:
on a busy host, a short one would expire live stages, which the tests would count twice."""


class Stages:
    """Stand-ins for the activities. Each test overrides the ones it is about.

    Every call is recorded as (activity, attempt number).
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.endings: list[Ending] = []
        self.override: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.instances: tuple[str, ...] = ()
        self.rows: tuple[CalibrationRow, ...] = ()

    async def _do(self, name: str, argument: Any, default: Any) -> Any:
        self.calls.append((name, getattr(argument, "attempt", 0)))
        if name in self.override:
            return await self.override[name](argument)
        return default

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @asynccontextmanager
    async def at_work(self, client: Client) -> AsyncIterator[None]:
        """Workers on every queue, including the real workflow worker."""
        async with self.carried_out(client), workflow_worker(client, checking_runner()):
            yield

    @asynccontextmanager
    async def carried_out(self, client: Client) -> AsyncIterator[None]:
        """Workers for the activities only. The test decides when a workflow worker runs."""
        async with AsyncExitStack() as workers:
            for queue in QUEUES:
                worker = Worker(
                    client,
                    task_queue=queue,
                    activities=self.activities(),
                    max_heartbeat_throttle_interval=HEARD_WITHIN,
                    graceful_shutdown_timeout=GRACE,
                )
                await workers.enter_async_context(worker)
            yield

    def activities(self) -> list[Callable[..., Any]]:
        """The activities for a worker."""
        return [
            self.boot,
            self.run_agent,
            self.stop_calls,
            self.capture,
            self.grade,
            self.emit,
            self.destroy,
            self.prepare,
            self.record,
            self.page,
            self.finish,
            self.serve_term,
            self.begin_anew,
            self.stand_in,
            self.prepare_calibration,
            self.load_rows,
            self.conclude,
            self.choose_twins,
            self.report,
        ]

    @activity.defn(name="serve_term")
    async def serve_term(self, term: Term) -> None:
        await self._do("serve_term", term, None)

    @activity.defn(name="begin_anew")
    async def begin_anew(self, term: Term) -> None:
        await self._do("begin_anew", term, None)

    @activity.defn(name="stand_in")
    async def stand_in(self, term: Term) -> None:
        await self._do("stand_in", term, None)

    @activity.defn(name="boot_sandbox")
    async def boot(self, attempt: Attempt) -> Booted:
        booted: Booted = await self._do("boot_sandbox", attempt, Booted(uri="file:///x"))
        return booted

    @activity.defn(name="run_agent")
    async def run_agent(self, attempt: Attempt) -> AgentRun:
        default = AgentRun(end=AgentEnd.FINISHED, turns=4, tokens=100, seconds=1.0)
        run: AgentRun = await self._do("run_agent", attempt, default)
        return run

    @activity.defn(name="stop_calls")
    async def stop_calls(self, attempt: Attempt) -> None:
        await self._do("stop_calls", attempt, None)

    @activity.defn(name="capture_diff")
    async def capture(self, attempt: Attempt) -> Captured:
        default = Captured(size=10, files=1, empty=False)
        captured: Captured = await self._do("capture_diff", attempt, default)
        return captured

    @activity.defn(name="grade_in_fresh_sandbox")
    async def grade(self, attempt: Attempt) -> GradedPatch:
        default = GradedPatch(outcome=Outcome.RESOLVED, reward=1.0)
        graded: GradedPatch = await self._do("grade_in_fresh_sandbox", attempt, default)
        return graded

    @activity.defn(name="emit_episode")
    async def emit(self, ending: Ending) -> EpisodeRef:
        self.endings.append(ending)
        graded = ending.status is RolloutStatus.GRADED
        default = EpisodeRef(
            uri="file:///x/episode.json",
            instance_id=ending.request.instance_id,
            sample_index=ending.request.sample_index,
            agent=ending.request.agent,
            status=ending.status,
            outcome=Outcome.RESOLVED if graded else None,
            reward=1.0 if graded else None,
            attempts=ending.attempts,
            failure=ending.failure,
        )
        episode: EpisodeRef = await self._do("emit_episode", ending, default)
        return episode

    @activity.defn(name="destroy_sandbox")
    async def destroy(self, attempt: Attempt) -> None:
        await self._do("destroy_sandbox", attempt, None)

    @activity.defn(name="prepare_run")
    async def prepare(self, run: RunRequest) -> PreparedRun:
        prepared: PreparedRun = await self._do(
            "prepare_run", run, PreparedRun(total=len(self.instances), uri="file:///run")
        )
        return prepared

    @activity.defn(name="record_change")
    async def record(self, run: RunRequest) -> None:
        await self._do("record_change", run, None)

    @activity.defn(name="load_page")
    async def page(self, request: PageRequest) -> Page:
        page: Page = await self._do(
            "load_page", request, Page(instances=self.instances[request.start : request.stop])
        )
        return page

    @activity.defn(name="finish_run")
    async def finish(self, run: RunRequest) -> RunSummary:
        summary: RunSummary = await self._do(
            "finish_run",
            run,
            RunSummary(
                run_id=run.run_id,
                uri="file:///m",
                rollouts=len(self.endings),
                by_status=dict(Counter(ending.status.value for ending in self.endings)),
            ),
        )
        return summary

    @activity.defn(name="prepare_calibration")
    async def prepare_calibration(self, request: CalibrationRequest) -> PreparedRun:
        prepared: PreparedRun = await self._do(
            "prepare_calibration", request, PreparedRun(total=len(self.rows))
        )
        return prepared

    @activity.defn(name="load_calibration_rows")
    async def load_rows(self, part: CalibrationPart) -> CalibrationPage:
        rows = self.rows[part.start : part.stop]
        default = CalibrationPage(rows=rows, total=len(self.rows))
        page: CalibrationPage = await self._do("load_calibration_rows", part, default)
        return page

    @activity.defn(name="conclude_calibration")
    async def conclude(self, row: RowToConclude) -> Conclusion:
        concluded: Conclusion = await self._do(
            "conclude_calibration", row, Conclusion(state="proved")
        )
        return concluded

    @activity.defn(name="choose_twins")
    async def choose_twins(self, row: RowToConclude) -> RowTwins:
        twins: RowTwins = await self._do("choose_twins", row, RowTwins(tests=1))
        return twins

    @activity.defn(name="report_calibration")
    async def report(self, request: CalibrationRequest) -> CalibrationSummary:
        default = CalibrationSummary(dataset=request.dataset, uri="file:///r", rows=len(self.rows))
        summary: CalibrationSummary = await self._do("report_calibration", request, default)
        return summary
