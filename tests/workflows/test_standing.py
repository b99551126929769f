"""What `perdure show` and `perdure status` say of a rollout that is open, on a real server."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.cli.standing import standing
from tests.stack import until

QUEUE = "standing"
WHY = "image 'python:3.11': no such host"


@activity.defn(name="boot_sandbox")
async def boot() -> None:
    raise ApplicationError(WHY)


@workflow.defn
class Boots:
    """Its sandbox cannot be made; tried again for ever."""

    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity(boot, start_to_close_timeout=timedelta(minutes=1))


@workflow.defn
class Waits:
    """Waits for an account."""

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.query
    def state(self) -> dict[str, object]:
        return {"stage": "boot", "story": ["told before", "waits for its turn"]}


@pytest.fixture
async def worker(client: Client) -> AsyncIterator[None]:
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[Boots, Waits],
        activities=[boot],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield


@pytest.mark.usefixtures("worker")
async def test_a_step_that_fails_is_told_with_its_reason(client: Client) -> None:
    """The step, the try and the last failure stand in one line."""
    await client.start_workflow(Boots.run, id="rollout/r/i/0", task_queue=QUEUE)

    async def failed_once() -> bool:
        return WHY in await standing(client, "rollout/r/i/0")

    await until(failed_once, "the reason is told")
    line = await standing(client, "rollout/r/i/0")

    assert line.startswith("boot_sandbox, try ")


@pytest.mark.usefixtures("worker")
async def test_a_wait_is_told_in_the_rollouts_own_words(client: Client) -> None:
    """Without a step under way, its newest line is the answer."""
    await client.start_workflow(Waits.run, id="rollout/r/i/1", task_queue=QUEUE)

    assert await standing(client, "rollout/r/i/1") == "waits for its turn"


async def test_an_unknown_rollout_stands_nowhere(client: Client) -> None:
    """Nothing is said of what Temporal does not know."""
    assert await standing(client, "rollout/r/i/2") == ""
