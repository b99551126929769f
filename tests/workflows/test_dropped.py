"""A worker evicts open workflows, which continue elsewhere. They must schedule nothing during
eviction."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

from activities.activity_decorator import GRACE
from perdure.client import temporal_names
from perdure.client.sdk import Perdure
from perdure.rollouts.activity_messages import AgentRun
from perdure.types import GroupRequest, RolloutRequest, RunRequest
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import workflow_worker

ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")
RUN = RunRequest(run_id="r1", dataset="toy", concurrency=2, rollout={"agent": "nop"})


async def rollout(client: Client) -> None:
    await Perdure(client).start_rollout(ROLLOUT)


async def group(client: Client) -> None:
    await Perdure(client).start_group(GroupRequest(rollout=ROLLOUT, n_samples=2))


async def run(client: Client) -> None:
    await Perdure(client).start_run(RUN)


def busy_agents() -> tuple[Stages, asyncio.Event]:
    """Agents that work until they are cancelled, and whether one has started."""
    stages, begun = Stages(), asyncio.Event()
    stages.instances = ("toy/add-1", "toy/add-2")

    async def work(_: Any) -> AgentRun:
        begun.set()
        while True:
            activity.heartbeat()
            await asyncio.sleep(0.1)

    stages.override["run_agent"] = work
    return stages, begun


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Coroutines that awaited during eviction, and activities scheduled outside a workflow."""
    found: list[str] = []
    execute = workflow.execute_activity

    def execute_or_complain(name: Any, *arguments: Any, **options: Any) -> Any:
        if not workflow.in_workflow():
            found.append(f"{name} was scheduled")
        return execute(name, *arguments, **options)

    monkeypatch.setattr(sys, "unraisablehook", lambda error: found.append(str(error.exc_value)))
    monkeypatch.setattr(workflow, "execute_activity", execute_or_complain)
    return found


@pytest.mark.parametrize(
    ("start", "shard"),
    [
        (rollout, 500),
        pytest.param(group, 500, marks=pytest.mark.longer),
        pytest.param(run, 500, marks=pytest.mark.longer),
        (run, 1),
    ],
    ids=["rollout", "group", "run", "sharded"],
)
async def test_a_workflow_that_its_worker_drops_schedules_nothing(
    client: Client,
    start: Callable[[Client], Awaitable[None]],
    shard: int,
    complaints: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker ends while the agent works, and no cleanup starts outside of the workflow."""
    monkeypatch.setattr("workflows.run_workflow.SHARD", shard)
    stages, begun = busy_agents()
    async with AsyncExitStack() as others:
        for queue in (
            temporal_names.BOOT_QUEUE,
            temporal_names.AGENT_QUEUE,
            temporal_names.IO_QUEUE,
        ):
            worker = Worker(
                client,
                task_queue=queue,
                activities=stages.activities(),
                graceful_shutdown_timeout=GRACE,
            )
            await others.enter_async_context(worker)
        async with workflow_worker(client):
            await start(client)
            await begun.wait()
        gc.collect()

    assert list(complaints) == []
