"""RolloutWorkflow on a metered account: it waits for permits without occupying a worker."""

import time
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

import workflows.rollout_workflow
from perdure.client import temporal_names
from perdure.rollouts.activity_messages import Attempt, Booted, Captured
from perdure.types import EpisodeRef, RolloutStatus
from tests.stack.wait_until import until
from tests.workflows.scripted_stages import Stages

REQUEST = {"run_id": "r1", "instance": "toy/add-1", "agent": "nop"}
STEP = "1-agent"


async def _start(client: Client, **fields: Any) -> WorkflowHandle[Any, EpisodeRef]:
    return await client.start_workflow(
        temporal_names.ROLLOUT,
        {**REQUEST, **fields},
        id="rollout/r1/add-1/0",
        task_queue=temporal_names.WORKFLOWS_QUEUE,
        result_type=EpisodeRef,
    )


def queue_up(stages: Stages) -> list[str]:
    """Boots that ask for a permit first. Returns the permit that each boot call had."""
    permits: list[str] = []

    async def boot(attempt: Attempt) -> Booted:
        permits.append(attempt.permit)
        expires = attempt.request.expires_at
        if expires is not None and time.time() > expires:
            return Booted(expired=True)
        return Booted(uri="file:///x") if attempt.permit else Booted(waits_for=STEP)

    stages.override["boot_sandbox"] = boot
    return permits


async def test_a_rollout_boots_when_it_is_granted(client: Client, stages: Stages) -> None:
    """The rollout asks, waits without a pending activity, and boots when its permit is granted."""
    permits = queue_up(stages)
    handle = await _start(client)
    await until(lambda: permits, "the account was asked")

    async def idle() -> bool:
        return not (await handle.describe()).raw_description.pending_activities

    await until(idle, "no activity is pending")
    await handle.signal(temporal_names.GRANTED, STEP)
    episode = await handle.result()

    assert (episode.status, permits) == (RolloutStatus.GRADED, ["", STEP])


async def test_the_grading_waits_for_its_turn_too(client: Client, stages: Stages) -> None:
    """If the grading sandbox needs a permit too, grading starts only after the grant."""

    async def capture(_: Any) -> Captured:
        return Captured(size=10, files=1, empty=False, waits_for="1-grade")

    stages.override["capture_diff"] = capture
    handle = await _start(client)
    await until(lambda: "capture_diff" in stages.names(), "the diff is captured")
    before = stages.names()
    await handle.signal(temporal_names.GRANTED, "1-grade")
    await handle.result()

    assert "grade_in_fresh_sandbox" not in before
    assert stages.names()[-2:] == ["grade_in_fresh_sandbox", "emit_episode"]


async def test_a_rollout_that_is_cancelled_while_it_waits_leaves_the_queue(
    client: Client, stages: Stages
) -> None:
    """The cleanup releases its place in the queue, and the episode says that it was cancelled."""
    permits = queue_up(stages)
    handle = await _start(client)
    await until(lambda: permits, "the account was asked")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()

    assert stages.names()[-2:] == ["destroy_sandbox", "emit_episode"]
    assert stages.endings[-1].status is RolloutStatus.CANCELLED


async def test_a_rollout_expires_in_the_queue(client: Client, stages: Stages) -> None:
    """A rollout that waits past its `expires_at` ends as expired, without a sandbox."""
    permits = queue_up(stages)
    episode = await (await _start(client, expires_at=time.time() + 2)).result()

    assert (episode.status, set(permits)) == (RolloutStatus.EXPIRED, {""})


async def test_a_rollout_that_waits_long_asks_again(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminated account workflow has forgotten the waiting rollouts, so they ask again."""
    monkeypatch.setattr(workflows.rollout_workflow, "ASK_AGAIN_S", 0.2)
    permits = queue_up(stages)
    handle = await _start(client)
    await until(lambda: len(permits) > 1, "the account was asked again")
    await handle.signal(temporal_names.GRANTED, STEP)

    assert (await handle.result()).status is RolloutStatus.GRADED
