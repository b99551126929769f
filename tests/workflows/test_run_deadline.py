"""Runs that end on time: at their deadline, and at `stop_at`."""

import asyncio
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client

from perdure.client.sdk import Perdure
from perdure.rollouts.activity_messages import (
    AgentRun,
    Attempt,
    Booted,
    Captured,
    Ending,
    GradedPatch,
)
from perdure.types import AgentEnd, EpisodeRef, Outcome, RolloutStatus, RunRequest, RunSummary
from tests.stack.wait_until import PATIENCE_S, until
from tests.workflows.scripted_stages import Stages

STOPPED = AgentRun(end=AgentEnd.LIMIT, turns=3, stopped=True)
RUN = RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"}, concurrency=4)


at_work: list[str] = []
"""The activities that are blocked."""


@pytest.fixture(autouse=True)
def _nothing_at_work() -> None:
    at_work.clear()


async def blocked(_: Any) -> Any:
    """An activity that works until it is cancelled."""
    at_work.append(activity.info().activity_type)
    while True:
        activity.heartbeat()
        await asyncio.sleep(0.2)  # between two heartbeats


async def agent_at_work(attempt: Attempt) -> AgentRun:
    return STOPPED if attempt.stop else await blocked(attempt)


def by_instance(endings: list[Ending]) -> dict[str, Ending]:
    return {ending.request.instance_id: ending for ending in endings}


async def ended(client: Client, run: RunRequest) -> RunSummary:
    async with asyncio.timeout(PATIENCE_S):
        return await (await Perdure(client).start_run(run)).result()


@pytest.mark.parametrize("shard", [500, 2])
async def test_a_deadline_stops_every_stage_and_keeps_what_was_done(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    """An agent at work is stopped and its diff is captured; a boot is undone; a grading ends; what has
    not started never does. None of them gets a reward, and each names its stage."""
    monkeypatch.setattr("workflows.run_workflow.SHARD", shard)
    stages.instances = ("toy/boots", "toy/works", "toy/grades", "toy/waits")

    async def boot(attempt: Attempt) -> Booted:
        boots = attempt.request.instance_id == "boots"
        return await blocked(attempt) if boots else Booted(uri="file:///x")

    async def agent(attempt: Attempt) -> AgentRun:
        works = attempt.request.instance_id == "works"
        return await agent_at_work(attempt) if works else AgentRun(end=AgentEnd.FINISHED, turns=4)

    kept: list[RunRequest] = []

    async def finish(run: RunRequest) -> RunSummary:
        kept.append(run)
        ends = [ending.status.value for ending in stages.endings]
        by_status = {end: ends.count(end) for end in ends}
        return RunSummary(run_id="r1", uri="file:///m", rollouts=len(ends), by_status=by_status)

    stages.override |= {"boot_sandbox": boot, "run_agent": agent}
    stages.override |= {"grade_in_fresh_sandbox": blocked, "finish_run": finish}
    run = RUN.model_copy(update={"deadline_s": 3600.0, "concurrency": 3})
    await Perdure(client).start_run(run)

    async def all_at_work() -> bool:
        return {"grade_in_fresh_sandbox", "run_agent"} <= set(at_work) and len(at_work) == 3

    await until(all_at_work, "each is in its stage", PATIENCE_S)
    summary = await ended(client, run.model_copy(update={"deadline_s": 0.5}))

    found = by_instance(stages.endings)
    assert {name: one.stopped_in for name, one in found.items()} == {
        "boots": "waiting",
        "works": "agent",
        "grades": "grade",
    }
    assert {one.status for one in found.values()} == {RolloutStatus.TRUNCATED}
    why = found["works"].failure
    assert why is not None
    assert why.message == "the run's deadline stopped its agent after 3 turns"
    assert stages.names().count("capture_diff") == 2
    assert summary.by_status == {"truncated": 3, "missing": 1}
    told = "its deadline of 0:00:00.500000 has passed"
    assert (summary.stopped, summary.stopped_by, kept[0].stopped) == (told, "deadline", told)


async def test_the_same_request_continues_a_run_that_its_deadline_ended(
    client: Client, stages: Stages
) -> None:
    """Its clock starts again. If no deadline has ended it, the same request only joins it."""
    stages.instances = ("toy/add-0", "toy/add-1")
    stages.override["run_agent"] = agent_at_work
    long, short = (RUN.model_copy(update={"deadline_s": s}) for s in (3600.0, 0.5))
    perdure = Perdure(client)
    await perdure.start_run(long)

    async def all_at_work() -> bool:
        return at_work == ["run_agent", "run_agent"]

    await until(all_at_work, "both are at work", PATIENCE_S)
    first = await ended(client, short)
    same = await perdure.start_run(short)
    await same.result()
    del stages.override["run_agent"]
    stages.endings.clear()
    longer = await perdure.start_run(long)
    summary = await longer.result()
    joined = await perdure.start_run(long)

    again = "deadline_s: counted from a new start"
    assert first.by_status == {"truncated": 2}
    assert (same.changes, longer.changes) == ([again], ["deadline_s: 0.5 -> 3600.0", again])
    assert (summary.by_status, summary.stopped) == ({"graded": 2}, "")
    assert (joined.joined, joined.changes, len(stages.endings)) == (True, [], 2)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rewarded", [False, True])
async def test_stop_at_ends_the_last_rollouts(
    client: Client, stages: Stages, grouped: bool, rewarded: bool
) -> None:
    """The stopped agent's patch is graded for information, or for its reward if the request asks."""
    stages.instances = ("toy/quick", "toy/slow")

    async def agent(attempt: Attempt) -> AgentRun:
        if attempt.request.instance_id == "slow":
            return await agent_at_work(attempt)
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    async def grade(_: Any) -> GradedPatch:
        return GradedPatch(outcome=Outcome.RESOLVED, reward=1.0, stored_as="grade-1.json")

    stages.override |= {"run_agent": agent, "grade_in_fresh_sandbox": grade}
    rollout = {"agent": "nop", "reward_truncated": rewarded}
    groups = {"n_samples": 2, "quorum": 2} if grouped else {}
    asked = {"rollout": rollout, "stop_at": 0.5, **groups}
    summary = await ended(client, RUN.model_copy(update=asked))

    last = [one for one in stages.endings if one.request.instance_id == "slow"]
    status = RolloutStatus.GRADED if rewarded else RolloutStatus.TRUNCATED
    assert {(one.status, one.grade) for one in last} == {(status, "grade-1.json")}
    assert summary.by_status.get("truncated", 0) == (0 if rewarded else len(last))
    assert summary.stopped_by == (None if rewarded else "stop_at")


async def test_nothing_starts_that_would_not_end_in_time(client: Client, stages: Stages) -> None:
    """A rollout of this run took 3,600 s. The others are left for the next start, and the
    run ends at once."""

    async def emit(ending: Ending) -> EpisodeRef:
        request = ending.request
        return EpisodeRef(
            uri="file:///x",
            instance_id=request.instance_id,
            sample_index=0,
            agent="nop",
            status=ending.status,
            reward=1.0,
            seconds=3600.0,
        )

    stages.override["emit_episode"] = emit
    stages.instances = ("toy/add-0", "toy/add-1", "toy/add-2")
    run = RUN.model_copy(update={"deadline_s": 3600.0, "concurrency": 1})
    summary = await ended(client, run)

    assert summary.by_status == {"graded": 1, "missing": 2}
    assert summary.stopped == "its deadline of 1:00:00 leaves no time for another rollout"


async def test_a_jittered_start_does_not_outlast_the_deadline(
    client: Client, stages: Stages
) -> None:
    """Rollouts that would begin within the hour never do, and the run ends at once."""
    stages.instances = ("toy/add-0", "toy/add-1")
    run = RUN.model_copy(update={"deadline_s": 3600.0, "start_jitter_s": 3600.0})
    started = await Perdure(client).start_run(run)

    async def both_wait() -> bool:
        return (await started.progress()).running == 2

    await until(both_wait, "both wait for their start", PATIENCE_S)
    summary = await ended(client, run.model_copy(update={"deadline_s": 0.5}))

    assert (summary.by_status, stages.endings) == ({"missing": 2}, [])


async def test_a_rollout_that_outlasts_its_run_keeps_its_patch(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is slow at the deadline: the run ends without it, and although the end of the run
    cancels it, its diff is captured."""
    monkeypatch.setattr("workflows.rollouts_in_flight.GRACE_PERIOD_S", 0.3)
    is_fast, captured = asyncio.Event(), []

    async def capture(_: Any) -> Captured:
        while not is_fast.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.2)  # between two heartbeats
        captured.append("diff")
        return Captured(size=10, files=1, empty=False)

    stages.override |= {"run_agent": agent_at_work, "capture_diff": capture}
    stages.instances = ("toy/add-0",)
    await Perdure(client).start_run(RUN.model_copy(update={"deadline_s": 3600.0}))

    async def is_at_work() -> bool:
        return at_work == ["run_agent"]

    async def is_cancelled() -> bool:
        history = await client.get_workflow_handle("rollout/r1/add-0/0").fetch_history()
        return any(
            event.HasField("workflow_execution_cancel_requested_event_attributes")
            for event in history.events
        )

    async def has_ended() -> bool:
        return bool(stages.endings)

    await until(is_at_work, "the agent works", PATIENCE_S)
    summary = await ended(client, RUN.model_copy(update={"deadline_s": 0.5}))
    await until(is_cancelled, "the end of the run cancels it", PATIENCE_S)
    is_fast.set()
    await until(has_ended, "the rollout ends by itself", PATIENCE_S)

    assert summary.by_status == {"running": 1}
    assert captured == ["diff"]
    assert (stages.endings[0].status, stages.endings[0].stopped_in) == (
        RolloutStatus.TRUNCATED,
        "agent",
    )
