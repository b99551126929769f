"""The store refuses or is damaged under the real workflows: no finished work and no episode is
lost."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from perdure.client.sdk import Perdure, RunHandle
from perdure.errors import Cancelled, NoResult
from perdure.rollouts.activity_messages import (
    AgentRun,
    Captured,
    GradedPatch,
    Page,
    PageRequest,
    PreparedRun,
)
from perdure.types import AgentEnd, Outcome, RolloutRequest, RolloutStatus, RunRequest
from tests.stack.wait_until import PATIENCE_S, until
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import checking_runner, workflow_worker
from workflows import activity_options

ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")
RUN = RunRequest(run_id="r1", dataset="toy", concurrency=8, rollout={"agent": "nop"})
TIME = timedelta(seconds=1.5)
"""The total time of a stage: enough for one retry, and not for a second one."""


USUAL = {
    "run_agent": AgentRun(end=AgentEnd.FINISHED, turns=4),
    "capture_diff": Captured(size=10, files=1, empty=False),
    "grade_in_fresh_sandbox": GradedPatch(outcome=Outcome.RESOLVED, reward=1.0),
}


class Away:
    """A stage that the store refuses until its time has run out twice."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.first_tries = 0

    async def __call__(self, _: Any) -> Any:
        self.first_tries += activity.info().attempt == 1
        if self.first_tries <= 2:
            raise ApplicationError("403", "store", type="StoreUnavailable")
        return self.result


@pytest.fixture
def short_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages that have a limit get `TIME`."""
    plain = activity_options.described

    def described(options: dict[str, Any], *arguments: str) -> dict[str, Any]:
        limited = "schedule_to_close_timeout" in options
        short = {"schedule_to_close_timeout": TIME} if limited else {}
        return plain(options, *arguments) | short  # type: ignore[arg-type]  # a typed dict

    monkeypatch.setattr(activity_options, "described", described)


@pytest.mark.usefixtures("short_stages")
@pytest.mark.parametrize("stage", USUAL)
async def test_a_stage_outlasts_the_outage(client: Client, stages: Stages, stage: str) -> None:
    """The time runs out while the store refuses, and the same attempt continues when the store is
    back."""
    stages.override[stage] = Away(USUAL[stage])

    episode = await (await Perdure(client).start_rollout(ROLLOUT)).result()

    assert (episode.status, episode.attempts) == (RolloutStatus.GRADED, 1)
    assert "destroy_sandbox" not in stages.names()


@pytest.mark.usefixtures("short_stages")
async def test_a_destroy_outlasts_the_outage(client: Client, stages: Stages) -> None:
    """A failed rollout's sandbox is destroyed when the store is back, and its episode follows."""

    async def fault(_: Any) -> Any:
        raise ApplicationError("bad", "instance", type="InstanceError", non_retryable=True)

    away = Away(None)
    stages.override |= {"run_agent": fault, "destroy_sandbox": away}

    episode = await (await Perdure(client).start_rollout(ROLLOUT)).result()

    assert (episode.status, away.first_tries) == (RolloutStatus.FAILED, 3)
    assert stages.names()[-2:] == ["destroy_sandbox", "emit_episode"]


def test_episodes_and_bookkeeping_have_no_last_hour() -> None:
    """Each try has a limit, and there is no total limit."""
    for options in (activity_options.emit(ROLLOUT), activity_options.bookkeeping()):
        assert "schedule_to_close_timeout" not in options


async def test_evidence_that_cannot_be_read_still_ends_in_an_episode(
    client: Client, stages: Stages
) -> None:
    """If the episode cannot be made of the stages' evidence, one without evidence says why."""

    async def fault(ending: Any) -> Any:
        if not ending.bare:
            raise ApplicationError("torn", type="UnexpectedError", non_retryable=True)
        del stages.override["emit_episode"]
        return await stages.emit(ending)

    stages.override["emit_episode"] = fault

    episode = await (await Perdure(client).start_rollout(ROLLOUT)).result()

    assert episode.failure is not None
    assert (episode.status, episode.failure.message) == (RolloutStatus.FAILED, "torn")


async def test_a_list_that_is_lost_ends_no_rollout_in_flight(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second page can never be read: the first page's rollouts are graded, then the run fails
    with a manifest."""
    monkeypatch.setattr("workflows.rollouts_in_flight.PAGE", 2)
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = tuple(f"toy/add-{k}" for k in range(4))
    lost = asyncio.Event()

    async def page(request: PageRequest) -> Page:
        if request.start:
            lost.set()
            raise ApplicationError("no list", type="NotFound", non_retryable=True)
        return Page(instances=stages.instances[:2])

    stages.override["load_page"] = page
    run = await Perdure(client).start_run(RUN)
    await gate.until_running(2)
    async with asyncio.timeout(PATIENCE_S):
        await lost.wait()
    gate.open.set()

    with pytest.raises(NoResult, match="no list"):
        await run.result()

    assert [ending.status for ending in stages.endings] == [RolloutStatus.GRADED] * 2
    assert stages.names()[-1] == "finish_run"


async def test_a_cancellation_together_with_the_list_leaves_a_manifest(client: Client) -> None:
    """No workflow worker runs while the list is made and the run is cancelled. The next worker gets
    both events at once."""
    stages = Stages()
    listing, told = asyncio.Event(), asyncio.Event()

    async def prepare(_: Any) -> PreparedRun:
        listing.set()
        await told.wait()
        return PreparedRun(total=1, uri="file:///run")

    stages.override["prepare_run"] = prepare
    stages.instances = ("toy/add-0",)
    async with stages.carried_out(client):
        async with workflow_worker(client, checking_runner()):
            run = await Perdure(client).start_run(RUN)
            async with asyncio.timeout(PATIENCE_S):
                await listing.wait()
        await run.cancel()
        told.set()

        async def listed() -> bool:
            events = (await run.handle.fetch_history()).events
            return any(e.HasField("activity_task_completed_event_attributes") for e in events)

        await until(listed, "the list is done")
        async with workflow_worker(client, checking_runner()):
            with pytest.raises(Cancelled):
                await run.result()

    assert stages.names() == ["prepare_run", "finish_run"]


async def test_a_run_cancelled_while_it_finishes_has_its_manifest(
    client: Client, stages: Stages
) -> None:
    """Everything is graded, and a cancellation during the last step changes nothing."""
    finishing, told = asyncio.Event(), asyncio.Event()

    async def finish(_: Any) -> Any:
        finishing.set()
        await told.wait()
        for _ in range(10):  # if it were told to stop, it would hear of it here
            activity.heartbeat()
            await asyncio.sleep(0.1)
        del stages.override["finish_run"]
        return await stages.finish(RUN)

    stages.override["finish_run"] = finish
    stages.instances = ("toy/add-0",)
    run = await Perdure(client).start_run(RUN)
    async with asyncio.timeout(PATIENCE_S):
        await finishing.wait()
    await run.cancel()
    await until(lambda: _heard(run), "the workflow has heard of it")
    told.set()
    summary = await run.result()

    assert summary.by_status == {"graded": 1}


async def _heard(run: RunHandle) -> bool:
    """Whether a workflow task was completed after the cancellation arrived."""
    events = (await run.handle.fetch_history()).events
    cancelled = [
        e.event_id
        for e in events
        if e.HasField("workflow_execution_cancel_requested_event_attributes")
    ]
    decided = [e.event_id for e in events if e.HasField("workflow_task_completed_event_attributes")]
    return bool(cancelled) and decided[-1] > cancelled[0]
