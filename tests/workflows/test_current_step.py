"""What `perdure show` and `perdure status` say of a rollout that is open, on a real server."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.cli.runs.steps import current_step
from tests.stack.waiting import until

QUEUE = "current-step"
WHY = "image 'python:3.11': no such host"
LACKS = "vllm at 10.0.0.7:8000 is suspect"


@activity.defn(name="boot_sandbox")
async def boot() -> None:
    raise ApplicationError(WHY)


@activity.defn(name="run_agent")
async def run_agent() -> None:
    waits = {"since": round(time.time()) - 75, "reason": LACKS}
    activity.heartbeat({"turns": 3, "waits": waits})
    await asyncio.Event().wait()


@activity.defn(name="run_agent")
async def lost_agent() -> None:
    activity.heartbeat({"turns": 3, "waits": {"since": 1, "reason": LACKS}})
    raise ApplicationError(WHY, next_retry_delay=timedelta(hours=1))


@workflow.defn
class Runs:
    """Its agent waits for an engine."""

    @workflow.run
    async def run(self) -> None:
        minute = timedelta(minutes=1)
        await workflow.execute_activity(
            run_agent, start_to_close_timeout=minute, heartbeat_timeout=minute
        )


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
        workflows=[Boots, Runs, Waits],
        activities=[boot, run_agent],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield


@pytest.mark.usefixtures("worker")
async def test_a_step_that_fails_is_told_with_its_reason(client: Client) -> None:
    """The step, the try and the last failure stand in one line."""
    await client.start_workflow(Boots.run, id="rollout/r/i/0", task_queue=QUEUE)

    async def failed_once() -> str:
        line = await current_step(client, "rollout/r/i/0")
        return line if WHY in line else ""

    line = await until(failed_once, "the reason is told")

    assert line.startswith("boot_sandbox, try ")


@pytest.mark.usefixtures("worker")
async def test_an_agent_that_waits_for_an_engine_is_told_since_when(client: Client) -> None:
    """How far it is, since when it waits and what the engines lack, from its last heartbeat."""
    await client.start_workflow(Runs.run, id="rollout/r/i/3", task_queue=QUEUE)

    async def beaten() -> bool:
        return LACKS in await current_step(client, "rollout/r/i/3")

    await until(beaten, "the wait is told")
    line = await current_step(client, "rollout/r/i/3")

    told = r"run_agent, 3 turns: waits for an engine since \d\d:\d\d:\d\d \([1-9]\d*:\d\d\): "
    assert re.fullmatch(told + re.escape(LACKS), line), line


async def test_a_wait_that_is_over_hides_no_failure(client: Client) -> None:
    """The last heartbeat of a try that failed says nothing of the next: the failure is told."""
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[Runs],
        activities=[lost_agent],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        await client.start_workflow(Runs.run, id="rollout/r/i/4", task_queue=QUEUE)

        async def failed_once() -> bool:
            return WHY in await current_step(client, "rollout/r/i/4")

        assert await until(failed_once, "the failure is told")


@pytest.mark.usefixtures("worker")
async def test_a_wait_is_told_in_the_rollouts_own_words(client: Client) -> None:
    """Without a step under way, its newest line is the answer."""
    await client.start_workflow(Waits.run, id="rollout/r/i/1", task_queue=QUEUE)

    async def answered() -> str:
        line = await current_step(client, "rollout/r/i/1")
        return "" if line.startswith("no worker answers") else line

    assert await until(answered, "a worker tells") == "waits for its turn"


async def test_an_unknown_rollout_stands_nowhere(client: Client) -> None:
    """Nothing is said of what Temporal does not know."""
    assert await current_step(client, "rollout/r/i/2") == ""
