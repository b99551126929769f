"""What a person does by hand on a workflow: wrong signals, and activities completed with anything."""

import asyncio

import pytest
from temporalio.client import Client

from perdure.client.api import Perdure
from perdure.rollouts.messages import AgentRun, Attempt
from perdure.types import AgentEnd, RolloutRequest, RolloutStatus, RunRequest
from tests.stack.waiting import until
from tests.workflows.stages import Stages

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
    """It answers afterwards, and ends with its summary."""
    agent = Agent(stages)
    stages.instances = ("toy/add-1",)
    run = await Perdure(client).start_run(
        RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
    )
    await agent.works.wait()

    await run.handle.signal("shard_report", args=given)
    agent.ends.set()

    assert (await run.result())["rollouts"] == 1


@pytest.mark.parametrize("signal", ["granted", "booting", "spent", "unknown"])
@pytest.mark.parametrize("given", [[], [{}], [1, 2, 3]])
async def test_a_rollout_drops_a_wrong_signal(
    client: Client, stages: Stages, signal: str, given: list[object]
) -> None:
    """It goes on to its verdict."""
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
    assert "run_agent was completed with something that is no AgentRun" in ending.failure.message
