"""A training loop can catch one error type when a workflow ends without a result."""

import asyncio

import pytest
from temporalio.client import Client, WorkflowFailureError

from perdure.client.sdk import Perdure
from perdure.client.sync_client import Perdure as SyncPerdure
from perdure.errors import Cancelled, NoResult, NotFound
from perdure.types import GroupRequest, RolloutRequest
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages

ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop", heartbeat_timeout_s=30.0)


@pytest.fixture
def gate(stages: Stages) -> Gate:
    """Agents that never finish."""
    gate = Gate()
    stages.override["run_agent"] = gate.agent
    return gate


async def test_a_cancelled_rollout_raises_cancelled(client: Client, gate: Gate) -> None:
    """The error names the rollout, and Temporal's error is its cause."""
    rollout = await Perdure(client).start_rollout(ROLLOUT)
    await gate.until_running(1)
    await rollout.cancel()

    with pytest.raises(Cancelled, match="rollout 'r1/add-1/0' was cancelled") as ended:
        await rollout.result()
    assert isinstance(ended.value.__cause__, WorkflowFailureError)


async def test_a_terminated_group_says_why(client: Client, gate: Gate) -> None:
    """The message has the reason that the user gave for the termination."""
    group = await Perdure(client).start_group(GroupRequest(rollout=ROLLOUT, n_samples=1))
    await gate.until_running(1)
    await group.handle.terminate(reason="the node is needed")

    said = "group 'r1/add-1' ended without a result: the node is needed"
    with pytest.raises(NoResult, match=said):
        await group.result()


async def test_what_never_started_is_not_found(client: Client) -> None:
    """A misspelled id raises NotFound at once."""
    misspelt = Perdure(client).rollout("rollout/r1/ad-1/0")

    for ask in (misspelt.result, misspelt.state):
        with pytest.raises(NotFound, match="rollout 'r1/ad-1/0' does not exist"):
            await ask()


async def test_a_sync_trainer_catches_the_same(client: Client, gate: Gate) -> None:
    """The error crosses into the waiting thread."""

    def wait() -> None:
        SyncPerdure.connect(client.service_client.config.target_host).start_rollout(
            ROLLOUT
        ).result()

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await gate.until_running(1)
    await Perdure(client).rollout(ROLLOUT.workflow_id).cancel()
    with pytest.raises(Cancelled):
        await waiting
