"""Runs that are cut into shards, which start, get signals and end independently."""

import asyncio
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError

from perdure.client.sdk import Perdure
from perdure.types import RunRequest
from tests.stack.wait_until import PATIENCE_S, until
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages
from workflows.run_workflow import RunShardWorkflow

RUN = RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
FIRST = f"{RUN.workflow_id}/shard/0"


@pytest.fixture
def gate(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Two shards of one instance each, whose agents wait."""
    monkeypatch.setattr("workflows.run_workflow.SHARD", 1)
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-0", "toy/add-1")
    return gate


async def test_a_pause_reaches_a_shard_that_is_being_started(
    client: Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is paused before it knows that the shard has started, so it signals the shard
    later."""
    start = workflow.start_child_workflow

    async def late(run: Any, *arguments: Any, **options: Any) -> Any:
        handle = await start(run, *arguments, **options)
        if run is RunShardWorkflow.run:
            await workflow.wait_condition(lambda: workflow.instance().throttle.paused)
        return handle

    monkeypatch.setattr(workflow, "start_child_workflow", late)
    run = await Perdure(client).start_run(RUN)
    await gate.until_running(1)
    await run.pause()

    async def signalled() -> bool:
        history = await client.get_workflow_handle(FIRST).fetch_history()
        found = [event.workflow_execution_signaled_event_attributes for event in history.events]
        return any(signal.signal_name == "set_paused" for signal in found)

    assert await until(signalled, "the shard is signalled the pause", 60)


@pytest.mark.parametrize(("samples", "more"), [(1, 2), (3, 1)])
async def test_shards_follow_another_number_of_samples(
    client: Client, stages: Stages, gate: Gate, samples: int, more: int
) -> None:
    """The open shard starts no sample that is no longer wanted. The missing ones run afterwards."""
    first = RUN.model_copy(update={"concurrency": 1, "n_samples": samples})
    await Perdure(client).start_run(first)
    await gate.until_running(1)

    changed = await Perdure(client).start_run(first.model_copy(update={"n_samples": more}))
    gate.open.set()
    summary = await changed.result()

    played = {(e.request.instance_id, e.request.sample_index) for e in stages.endings}
    assert played == {(name, k) for name in ("add-0", "add-1") for k in range(more)}
    assert summary.stopped == ""


async def test_a_shard_that_is_terminated_ends_the_run(
    client: Client, stages: Stages, gate: Gate
) -> None:
    """A terminated shard sends no reports: the run writes its manifest and fails instead of
    waiting."""
    run = await Perdure(client).start_run(RUN.model_copy(update={"concurrency": 1}))
    await gate.until_running(1)
    await client.get_workflow_handle(FIRST).terminate()

    with pytest.raises(WorkflowFailureError):
        async with asyncio.timeout(PATIENCE_S):
            await run.handle.result()

    assert "finish_run" in stages.names()


@pytest.mark.longer
async def test_the_room_of_a_run_is_used_across_its_shards(
    client: Client, stages: Stages, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard starts as soon as the previous one has started all its rollouts. Together they have
    exactly the run's concurrency in flight, also after a resize."""
    monkeypatch.setattr("workflows.run_workflow.SHARD", 2)
    stages.instances = tuple(f"toy/add-{k}" for k in range(7))
    run = await Perdure(client).start_run(RUN.model_copy(update={"concurrency": 1}))
    for room in (1, 3, 4):
        await run.resize(room)
        await gate.until_running(room)
    gate.open.set()
    await run.result()

    history = await run.handle.fetch_history()
    begun = [e.start_child_workflow_execution_initiated_event_attributes for e in history.events]
    asked = [await client.data_converter.decode(b.input.payloads) for b in begun if b.workflow_id]
    assert [request["concurrency"] for request, _ in asked[:2]] == [1, 3 - 2]
    assert gate.most == 4
    assert len(stages.endings) == 7
