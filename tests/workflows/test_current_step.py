"""What `perdure show` and `perdure status` say about an open rollout, on a real server."""

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

from perdure.cli.runs.rollout_progress import current_step
from tests.stack.wait_until import until

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
    """A rollout whose agent waits for an engine."""

    @workflow.run
    async def run(self) -> None:
        minute = timedelta(minutes=1)
        await workflow.execute_activity(
            run_agent, start_to_close_timeout=minute, heartbeat_timeout=minute
        )


@workflow.defn
class Boots:
    """A rollout whose sandbox cannot be created, so that Temporal retries forever."""

    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity(boot, start_to_close_timeout=timedelta(minutes=1))


@workflow.defn
class Waits:
    """A rollout that waits for a permit of an account."""

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
async def test_a_failing_step_is_shown_with_its_reason(client: Client) -> None:
    """One line has the step, the number of the try and the last failure."""
    await client.start_workflow(Boots.run, id="rollout/r/i/0", task_queue=QUEUE)

    async def failed_once() -> str:
        line = await current_step(client, "rollout/r/i/0")
        return line if WHY in line else ""

    line = await until(failed_once, "the reason is told")

    assert line.startswith("boot_sandbox, try ")


@pytest.mark.usefixtures("worker")
async def test_a_wait_for_an_engine_is_shown_with_its_start(client: Client) -> None:
    """The last heartbeat reports the turns, the start of the wait, and why no engine is
    available."""
    await client.start_workflow(Runs.run, id="rollout/r/i/3", task_queue=QUEUE)

    async def beaten() -> bool:
        return LACKS in await current_step(client, "rollout/r/i/3")

    await until(beaten, "the wait is told")
    line = await current_step(client, "rollout/r/i/3")

    told = r"run_agent, 3 turns: waits for an engine since \d\d:\d\d:\d\d \([1-9]\d*:\d\d\): "
    assert re.fullmatch(told + re.escape(LACKS), line), line


async def test_a_past_wait_does_not_hide_a_failure(client: Client) -> None:
    """Between two tries, the old heartbeat does not count, and the line has the failure."""
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
async def test_a_wait_of_the_workflow_is_shown(client: Client) -> None:
    """Without a pending activity, the line is the workflow's latest event."""
    await client.start_workflow(Waits.run, id="rollout/r/i/1", task_queue=QUEUE)

    async def answered() -> str:
        line = await current_step(client, "rollout/r/i/1")
        return "" if line.startswith("no worker answers") else line

    assert await until(answered, "a worker tells") == "waits for its turn"


async def test_an_unknown_rollout_has_no_step(client: Client) -> None:
    """For an unknown rollout the line is empty."""
    assert await current_step(client, "rollout/r/i/2") == ""


async def test_a_wait_for_a_seat_is_shown(client: Client) -> None:
    """No host has a free seat, so no worker has taken the boot yet."""
    async with Worker(
        client, task_queue=QUEUE, workflows=[Boots], workflow_runner=UnsandboxedWorkflowRunner()
    ):
        await client.start_workflow(Boots.run, id="rollout/r/i/5", task_queue=QUEUE)

        async def waits() -> bool:
            line = await current_step(client, "rollout/r/i/5")
            return line.startswith("waits for a free seat on a host since ")

        assert await until(waits, "the wait is told")


async def test_a_wait_for_the_host_of_a_sandbox_is_shown(client: Client) -> None:
    """No worker of the sandbox's host polls, for example because another stack with the same store
    owns it."""
    async with Worker(
        client, task_queue=QUEUE, workflows=[Runs], workflow_runner=UnsandboxedWorkflowRunner()
    ):
        await client.start_workflow(Runs.run, id="rollout/r/i/7", task_queue=QUEUE)

        async def waits() -> bool:
            line = await current_step(client, "rollout/r/i/7")
            return line.startswith("run_agent: waits for a worker that reaches its sandbox")

        assert await until(waits, "the wait is told")


@activity.defn(name="boot_sandbox")
async def busy_boot() -> None:
    activity.heartbeat({"doing": {"what": "the packages of codex", "since": time.time() - 12}})
    await asyncio.Event().wait()


@workflow.defn
class Prepares:
    """A rollout whose boot is fetching something."""

    @workflow.run
    async def run(self) -> None:
        minute = timedelta(minutes=1)
        await workflow.execute_activity(
            busy_boot, start_to_close_timeout=minute, heartbeat_timeout=minute
        )


async def test_what_boot_is_busy_with_is_shown(client: Client) -> None:
    """A first fetch or build takes a minute. The line says what it is, and since when."""
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[Prepares],
        activities=[busy_boot],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        await client.start_workflow(Prepares.run, id="rollout/r/i/6", task_queue=QUEUE)

        async def told() -> str:
            line = await current_step(client, "rollout/r/i/6")
            return line if "busy" in line else ""

        line = await until(told, "the heartbeat is told")

    assert re.fullmatch(r"boot_sandbox: busy with the packages of codex \(\d+:\d\d\)", line), line
