"""What a trainer and a user see while no worker polls, on a real server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import (
    Client,
    Interceptor,
    OutboundInterceptor,
    QueryWorkflowInput,
    WorkflowHandle,
)
from temporalio.service import RPCError, RPCStatusCode

from perdure.client.sdk import GroupHandle, Perdure
from perdure.client.temporal_client import DATA_CONVERTER
from perdure.rollouts.activity_messages import AgentRun
from perdure.types import GroupRequest, RolloutRequest, RunRequest
from tests.stack.wait_until import PATIENCE_S, until
from tests.workflows import dev_server
from tests.workflows.scripted_stages import Stages

ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop")
GROUP = GroupRequest(rollout=ROLLOUT, n_samples=2)
RUN = RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
AT_ONCE = ("--dynamic-config-value", 'matching.queryPollerUnavailableWindow="100ms"')
"""The server notices missing workers after this time instead of 20 s."""


class Hurried(Interceptor):
    """Queries wait two seconds for their answer instead of 30. Statuses of failed ones are
    recorded."""

    def __init__(self) -> None:
        self.statuses: list[RPCStatusCode] = []

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _Hurried(next, self.statuses)


class _Hurried(OutboundInterceptor):
    def __init__(self, next: OutboundInterceptor, statuses: list[RPCStatusCode]) -> None:
        super().__init__(next)
        self.statuses = statuses

    async def query_workflow(self, input: QueryWorkflowInput) -> Any:
        try:
            return await super().query_workflow(replace(input, rpc_timeout=timedelta(seconds=2)))
        except RPCError as error:
            self.statuses.append(error.status)
            raise


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with dev_server.serving(*AT_ONCE) as client:
        yield client


@pytest.fixture
def hurried() -> Hurried:
    return Hurried()


@pytest.fixture
def perdure(client: Client, hurried: Hurried) -> Perdure:
    hurrying = Client(client.service_client, data_converter=DATA_CONVERTER, interceptors=[hurried])
    return Perdure(hurrying)


@pytest.mark.longer
async def test_a_run_whose_workers_have_gone_says_so(
    client: Client, perdure: Perdure, hurried: Hurried
) -> None:
    """The progress is an answer even when the server knows that no worker polls: the server's
    counts are used."""
    stages, begun = Stages(), asyncio.Event()
    stages.instances = ("toy/add-1",)

    async def stand(_: Any) -> AgentRun:
        begun.set()
        return await asyncio.Future()

    stages.override["run_agent"] = stand
    async with stages.at_work(client):
        run = await perdure.start_run(RUN)
        await begun.wait()

    async def refused() -> bool:
        assert (await run.progress()).state == "no worker answers"
        return RPCStatusCode.FAILED_PRECONDITION in hurried.statuses

    assert await until(refused, "the server misses the workers")
    counted = await run.progress()
    assert (counted.started, counted.running, counted.done) == (1, 1, 0)
    impatient = await run.progress(patience=timedelta(milliseconds=300))
    assert impatient.running == 1

    await run.handle.terminate()
    (rollout,) = await perdure.rollouts(RUN.run_id)
    await client.get_workflow_handle(rollout.workflow_id).terminate()

    async def closed() -> bool:
        return (await run.progress()).running == 0

    assert await until(closed, "the server lists both as terminated")
    ended = await run.progress()
    assert (ended.state, ended.started, ended.done) == ("terminated", 1, 0)


async def test_episodes_of_a_finished_group_wait_for_a_worker(
    client: Client, perdure: Perdure, hurried: Hurried
) -> None:
    """The group ends, then its workers: a trainer gets the episodes once a worker polls again."""
    stages = Stages()
    async with stages.at_work(client):
        await (await perdure.start_group(GROUP)).result()
    handle: WorkflowHandle[Any, Any] = perdure.client.get_workflow_handle(GROUP.workflow_id)
    group = GroupHandle(perdure, 2, handle)
    reading = asyncio.create_task(_read(group))
    await until(lambda: RPCStatusCode.FAILED_PRECONDITION in hurried.statuses, "no worker answers")
    async with stages.at_work(client):
        seen = await reading

    assert sorted(seen) == [0, 1]


async def _read(group: GroupHandle) -> list[int]:
    return [episode.sample_index async for episode in group.refs()]


async def test_a_group_that_no_worker_began_has_no_episodes(
    client: Client, perdure: Perdure
) -> None:
    """A group that was terminated before any worker saw it has no episodes, and the client does not
    wait."""
    group = await perdure.start_group(GROUP)
    await group.handle.terminate()

    async with Stages().at_work(client), asyncio.timeout(PATIENCE_S):
        assert await _read(group) == []
