"""What users do to a workflow by hand: wrong signals, and activities completed with any result."""

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import Worker

from activities.activity_decorator import GRACE
from perdure.client import temporal_names
from perdure.client.sdk import Perdure, RunHandle
from perdure.rollouts.activity_messages import AgentRun, Attempt, SweepRequest
from perdure.types import AgentEnd, RolloutRequest, RolloutStatus, RunRequest
from tests.stack.wait_until import PATIENCE_S, until
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import workflow_worker

REQUEST = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")


class Agent:
    """An agent that works until it is told to end."""

    def __init__(self, stages: Stages) -> None:
        self.works, self.ends = asyncio.Event(), asyncio.Event()
        stages.override["run_agent"] = self.run

    async def run(self, attempt: Attempt) -> AgentRun:
        self.works.set()
        await self.ends.wait()
        return AgentRun(end=AgentEnd.FINISHED)


@pytest.mark.parametrize("given", [[1], [], ["x", {}], [1, {}, 2]])
async def test_a_run_drops_a_wrong_signal(
    client: Client, stages: Stages, given: list[object]
) -> None:
    """The run still answers queries afterwards, and ends with its summary."""
    agent = Agent(stages)
    stages.instances = ("toy/add-1",)
    run = await Perdure(client).start_run(
        RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
    )
    await agent.works.wait()

    await run.handle.signal("shard_report", args=given)
    agent.ends.set()

    assert (await run.result()).rollouts == 1


@pytest.mark.parametrize("signal", ["granted", "booting", "spent", "truncate", "unknown"])
@pytest.mark.parametrize("given", [[], [{}], [1, 2, 3]])
async def test_a_rollout_drops_a_wrong_signal(
    client: Client, stages: Stages, signal: str, given: list[object]
) -> None:
    """The rollout continues to its verdict."""
    if (signal, given) == ("spent", []):
        pytest.skip("this is right, and stops the agent")
    agent = Agent(stages)
    rollout = await Perdure(client).start_rollout(REQUEST)
    await agent.works.wait()

    await rollout.handle.signal(signal, args=given)
    agent.ends.set()

    assert (await rollout.result()).status is RolloutStatus.GRADED


@pytest.mark.parametrize(
    "given",
    [None, {}, {"end": "no such end"}, "text", [1]],
    ids=["null", "empty", "end", "text", "list"],
)
async def test_an_agent_completed_by_hand_with_anything_has_no_verdict(
    client: Client, stages: Stages, given: object
) -> None:
    """The rollout fails, and its failure names the activity."""
    agent = Agent(stages)
    rollout = await Perdure(client).start_rollout(REQUEST)
    await agent.works.wait()

    handle = client.get_async_activity_handle(
        workflow_id=rollout.handle.id, run_id=None, activity_id="agent-1"
    )
    await handle.complete(given)
    await until(lambda: stages.endings, "the episode is written")
    agent.ends.set()
    [ending] = stages.endings

    assert ending.status is RolloutStatus.FAILED
    assert ending.failure is not None
    assert ending.failure.type == "InvalidResult"
    assert "run_agent was completed with an invalid AgentRun" in ending.failure.message


@activity.defn(name="sweep_sandboxes")
async def _swept_by_hand(_: SweepRequest) -> str:
    return "done"


async def test_a_sweep_completed_by_hand_with_anything_fails_with_a_sentence(
    client: Client,
) -> None:
    """The sweep workflow fails with a sentence, so that the schedule can start the next one."""
    async with (
        workflow_worker(client),
        Worker(
            client,
            task_queue=temporal_names.IO_QUEUE,
            activities=[_swept_by_hand],
            graceful_shutdown_timeout=GRACE,
        ),
    ):
        with pytest.raises(WorkflowFailureError) as failed:
            await client.execute_workflow(
                temporal_names.REAPER,
                id="sweep",
                task_queue=temporal_names.WORKFLOWS_QUEUE,
                execution_timeout=timedelta(seconds=PATIENCE_S),
            )

    assert "sweep_sandboxes was completed with an invalid SweepReport" in str(
        failed.value.cause.__cause__
    )


@pytest.mark.longer
async def test_a_run_that_is_reset_is_followed(client: Client, stages: Stages) -> None:
    """A waiting client gets the result of the next execution, in which rollouts in flight count as
    running."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    stages.instances = ("toy/add-1", "toy/add-2")
    run = await Perdure(client).start_run(
        RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
    )
    result = asyncio.create_task(run.result())
    await gate.until_running(2)
    first = (await run.handle.describe()).run_id
    await _reset(client, run.handle.id)
    await until(lambda: _is_another(run, first), "the next execution plays")
    seen = await run.progress()
    gate.open.set()
    summary = await result

    assert "failed" not in seen.by_status
    assert summary.rollouts >= 2


async def _is_another(run: RunHandle, first: str | None) -> bool:
    """Whether the execution after the reset has tried to start its rollouts."""
    described = await run.handle.describe()
    if described.run_id == first:
        return False
    history = await run.handle.fetch_history()
    return any(
        event.HasField("start_child_workflow_execution_failed_event_attributes")
        or event.HasField("child_workflow_execution_started_event_attributes")
        for event in history.events
    )


async def _reset(client: Client, workflow_id: str) -> None:
    """Reset to the first workflow task, like `temporal workflow reset --type FirstWorkflowTask`."""
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    task = next(
        event.event_id
        for event in history.events
        if event.HasField("workflow_task_completed_event_attributes")
    )
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id),
            reason="probe",
            workflow_task_finish_event_id=task,
            request_id=str(uuid4()),
        )
    )
