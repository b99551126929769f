"""Activities that do nothing, so that only Temporal's work for a rollout remains."""

import asyncio
from collections.abc import Callable
from typing import Any

from temporalio import activity
from temporalio.worker import (
    ActivityInboundInterceptor,
    ActivityOutboundInterceptor,
    Interceptor,
)

from activities.heartbeats import WATCH, heartbeats
from perdure.client import temporal_names
from perdure.rollouts.activity_messages import (
    AgentRun,
    Attempt,
    Booted,
    Captured,
    Ending,
    GradedPatch,
    Page,
    PageRequest,
    PreparedRun,
)
from perdure.types import AgentEnd, EpisodeRef, Outcome, RolloutStatus, RunRequest
from perdure.types import RunSummary as Summary

HOST = "bench"
QUEUES = (
    *(
        temporal_names.BOOT_QUEUE,
        temporal_names.AGENT_QUEUE,
        temporal_names.GRADE_QUEUE,
        temporal_names.IO_QUEUE,
    ),
    *(temporal_names.host_queue(HOST), temporal_names.upkeep_queue(HOST)),
)


class Stages:
    """Activities for runs with `count` instances each. An agent takes `agent_s` seconds."""

    def __init__(self, count: int, agent_s: float = 0.0) -> None:
        self._agent_s = agent_s
        self._ids = tuple(f"toy/add-{number:05d}" for number in range(count))

    def activities(self) -> list[Callable[..., Any]]:
        stages = (self.boot, self.run_agent, self.capture, self.grade, self.emit, self.destroy)
        return [*stages, self.prepare, self.page, self.finish]

    @activity.defn(name="boot_sandbox")
    async def boot(self, _: Attempt) -> Booted:
        return Booted(uri="file:///stub", host=HOST)

    @activity.defn(name="run_agent")
    async def run_agent(self, _: Attempt) -> AgentRun:
        async with heartbeats(WATCH):
            await asyncio.sleep(self._agent_s)
        return AgentRun(end=AgentEnd.FINISHED, turns=4, tokens=100, seconds=1.0)

    @activity.defn(name="capture_diff")
    async def capture(self, _: Attempt) -> Captured:
        return Captured(size=10, files=1, empty=False)

    @activity.defn(name="grade_in_fresh_sandbox")
    async def grade(self, _: Attempt) -> GradedPatch:
        return GradedPatch(outcome=Outcome.RESOLVED, reward=1.0)

    @activity.defn(name="emit_episode")
    async def emit(self, ending: Ending) -> EpisodeRef:
        return EpisodeRef(
            uri="file:///stub/episode.json",
            instance_id=ending.request.instance_id,
            sample_index=ending.request.sample_index,
            agent=ending.request.agent,
            status=RolloutStatus.GRADED,
            outcome=Outcome.RESOLVED,
            reward=1.0,
            attempts=ending.attempts,
        )

    @activity.defn(name="destroy_sandbox")
    async def destroy(self, _: Attempt) -> None: ...

    @activity.defn(name="prepare_run")
    async def prepare(self, _: RunRequest) -> PreparedRun:
        return PreparedRun(total=len(self._ids), uri="file:///run")

    @activity.defn(name="load_page")
    async def page(self, request: PageRequest) -> Page:
        return Page(instances=self._ids[request.start : request.stop])

    @activity.defn(name="finish_run")
    async def finish(self, run: RunRequest) -> Summary:
        return Summary(
            run_id=run.run_id,
            uri="file:///run",
            rollouts=len(self._ids),
            by_status={RolloutStatus.GRADED.value: len(self._ids)},
        )


class HeartbeatCounting(Interceptor):
    """Counts heartbeats. The SDK sends each, because agents send fewer than it would hold back."""

    def __init__(self) -> None:
        self.count = 0

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        counting = self

        class Outbound(ActivityOutboundInterceptor):
            def heartbeat(self, *details: Any) -> None:
                counting.count += 1
                super().heartbeat(*details)

        class Inbound(ActivityInboundInterceptor):
            def init(self, outbound: ActivityOutboundInterceptor) -> None:
                super().init(Outbound(outbound))

        return Inbound(next)
