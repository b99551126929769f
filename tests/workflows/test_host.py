"""HostWorkflow on a real server: what happens if a host is silent, comes back, or leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.activity_decorator import GRACE
from activities.lost_host_activities import StandIn
from perdure.client import temporal_names
from perdure.client.sdk import Perdure
from perdure.rollouts.activity_messages import (
    WORKER_EVICTED,
    AgentRun,
    Attempt,
    Booted,
    HostState,
    Term,
)
from perdure.rollouts.sandbox.host_term import first_term
from perdure.storage.local_store import LocalStore
from perdure.types import AgentEnd, RolloutRequest, RolloutStatus
from tests.stack.wait_until import until
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import checking_runner, workflow_worker

HOST = "host-1"
TERM = Term(host=HOST, silent_s=4)
REQUEST = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop", heartbeat_timeout_s=2)


class HostLife:
    """A host process that sends heartbeats while it is told to, and counts the activities it
    gets."""

    def __init__(self) -> None:
        self.beats = True
        self.served: list[int] = []
        self.begun: list[int] = []
        self.leaves = asyncio.Event()

    @activity.defn(name="serve_term")
    async def serve(self, term: Term) -> None:
        self.served.append(term.number)
        while not self.leaves.is_set():
            if self.beats:
                activity.heartbeat()
            await asyncio.sleep(0.2)
        self.leaves.clear()

    @activity.defn(name="begin_anew")
    async def begin(self, term: Term) -> None:
        self.begun.append(term.number)

    @asynccontextmanager
    async def shown(self, client: Client) -> AsyncIterator[None]:
        async with Worker(
            client, task_queue=temporal_names.life_queue(HOST), activities=[self.serve, self.begin]
        ):
            yield


@pytest.fixture
def life() -> HostLife:
    return HostLife()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@asynccontextmanager
async def _asked_about(
    client: Client, stand_in: Callable[..., Any]
) -> AsyncIterator[WorkflowHandle[Any, Any]]:
    """The workflow of one host, and a worker elsewhere that stands in with this activity."""
    async with AsyncExitStack() as workers:
        for worker in (
            workflow_worker(client, checking_runner()),
            Worker(
                client,
                task_queue=temporal_names.LOST_HOSTS_QUEUE,
                activities=[stand_in],
                graceful_shutdown_timeout=GRACE,
            ),
        ):
            await workers.enter_async_context(worker)
        handle = await client.start_workflow(
            temporal_names.HOST,
            TERM,
            id=temporal_names.host_id(HOST),
            task_queue=temporal_names.WORKFLOWS_QUEUE,
        )
        yield handle
        await handle.terminate()


@pytest.fixture
async def host(client: Client, store: LocalStore) -> AsyncIterator[WorkflowHandle[Any, Any]]:
    needed = SimpleNamespace(store=store, host="elsewhere")
    stand_in = StandIn(needed)  # type: ignore[arg-type]  # it needs no more of the services
    async with _asked_about(client, stand_in.stand_in) as handle:
        yield handle


async def _is(host: WorkflowHandle[Any, Any], **wanted: Any) -> bool:
    state: HostState = await host.query("state", result_type=HostState)
    return all(getattr(state, name) == value for name, value in wanted.items())


TIMEOUT = timedelta(minutes=1)


@asynccontextmanager
async def _own_worker(client: Client) -> AsyncIterator[list[int]]:
    """The host's own worker, and the attempts that it got."""
    stages = Stages()
    seen: list[int] = []

    async def run(attempt: Attempt) -> AgentRun:
        seen.append(attempt.attempt)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = run
    queue = temporal_names.host_queue(HOST)
    async with Worker(
        client, task_queue=queue, activities=stages.activities(), graceful_shutdown_timeout=GRACE
    ):
        yield seen


@pytest.mark.longer
async def test_rollouts_of_a_silent_host_move(
    client: Client, host: WorkflowHandle[Any, Any], life: HostLife, store: LocalStore
) -> None:
    """Other workers answer for its agents, a new attempt boots, and the host gets no more work."""
    stages, booted = Stages(), asyncio.Event()

    async def boot(attempt: Attempt) -> Booted:
        booted.set()
        return Booted(host=HOST if attempt.attempt == 1 else None)

    stages.override["boot_sandbox"] = boot
    queues = (
        temporal_names.BOOT_QUEUE,
        temporal_names.AGENT_QUEUE,
        temporal_names.GRADE_QUEUE,
        temporal_names.IO_QUEUE,
    )
    async with AsyncExitStack() as workers:
        for queue in queues:
            worker = Worker(
                client,
                task_queue=queue,
                activities=stages.activities(),
                graceful_shutdown_timeout=GRACE,
            )
            await workers.enter_async_context(worker)
        async with life.shown(client):
            await until(lambda: life.served, "the host serves")
            rollout = await Perdure(client).start_rollout(REQUEST)
            await booted.wait()
        episode = await rollout.result()

    assert (episode.status, episode.attempts) == (RolloutStatus.GRADED, 2)
    history = await rollout.handle.fetch_history()
    sent = [
        event.activity_task_scheduled_event_attributes.task_queue.name for event in history.events
    ]
    assert (
        sent.count(temporal_names.host_queue(HOST)),
        sent.count(temporal_names.upkeep_queue(HOST)),
    ) == (1, 0)
    assert await _is(host, lost=True, number=1)
    assert await first_term(store, HOST) == 1


@pytest.mark.longer
async def test_a_host_whose_beats_were_not_heard_is_asked_once_more(
    client: Client, host: WorkflowHandle[Any, Any], life: HostLife
) -> None:
    """If the server or the connection was down, the host answers in time, and its term
    continues."""
    life.beats = False
    async with life.shown(client):
        await until(lambda: len(life.served) == 2, "it is asked again")

        assert (life.served, life.begun) == ([0, 0], [])
        assert await _is(host, lost=False, number=0)


@pytest.mark.longer
async def test_a_host_that_comes_back_begins_anew(
    client: Client, host: WorkflowHandle[Any, Any], life: HostLife
) -> None:
    """The host kills the sandboxes of its last term before the next one. Then its own workers get
    work again."""
    await until(lambda: _is(host, lost=True), "the host is lost")
    async with life.shown(client):
        await until(lambda: life.served, "it serves again")

        assert (life.begun, life.served) == ([1], [1])
        assert await _is(host, lost=False, number=1)
        async with _own_worker(client) as own:
            await client.execute_activity(
                "run_agent",
                Attempt(request=REQUEST, attempt=1),
                id="own",
                task_queue=temporal_names.host_queue(HOST),
                start_to_close_timeout=TIMEOUT,
            )

        assert own == [1]


@pytest.mark.longer
async def test_a_host_comes_back_while_the_worker_that_stands_in_is_told_to_stop(
    client: Client, life: HostLife
) -> None:
    """The activity ends as evicted, not as cancelled. It is not dispatched again, because the host
    serves."""

    @activity.defn(name="stand_in")
    async def evicted(term: Term) -> None:
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            raise ApplicationError("it hands over", type=WORKER_EVICTED) from None

    async with _asked_about(client, evicted) as host:
        await until(lambda: _is(host, lost=True), "the host is lost")
        async with life.shown(client):
            await until(lambda: life.served, "it serves again")

            assert (life.begun, life.served) == ([1], [1])


async def test_a_host_that_leaves_is_not_waited_for(
    client: Client, host: WorkflowHandle[Any, Any], life: HostLife
) -> None:
    """The host completes serve_term when it leaves, and its work moves at once."""
    async with life.shown(client):
        await until(lambda: life.served, "the host serves")
        life.leaves.set()
        await until(lambda: life.begun, "its next term is offered")

        assert life.begun == [1]
