"""Rollouts that wait for a seat: real workflows and real seats, with stand-in stages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from activities.activity_decorator import GRACE
from perdure.client import search_attribute_keys as attributes
from perdure.client import temporal_names
from perdure.client.sdk import Perdure
from perdure.rollouts.activity_messages import AgentRun, Attempt, Booted, Captured
from perdure.rollouts.admission.host_seats import Seats
from perdure.rollouts.sandbox.host_term import HostTerm
from perdure.types import AgentEnd, RolloutRequest, RolloutStatus, RunRequest
from tests.stack.wait_until import until
from tests.workflows.scripted_stages import QUEUES, Stages
from workers.host import boot_slots as slots
from workers.workflow_worker import checking_runner, workflow_worker
from workflows import activity_options

HOST = "host-1"
SEATS = 2
ROLLOUTS = 5 * SEATS
SILENT = timedelta(seconds=1)
"""Seconds that each agent runs. The last rollout waits for a multiple of this."""


def _request(sample: int = 0, **fields: Any) -> RolloutRequest:
    values = {"run_id": "r1", "instance": "toy/add-1", "agent": "nop", "sample_index": sample}
    return RolloutRequest.model_validate({**values, **fields})


@asynccontextmanager
async def host(client: Client, seats: Seats, stages: Stages) -> AsyncIterator[None]:
    """A host whose boots take its seats. All other queues have enough slots."""
    async with AsyncExitStack() as workers:
        for queue in QUEUES:
            boots = queue == temporal_names.BOOT_QUEUE
            worker = Worker(
                client,
                task_queue=queue,
                activities=stages.activities(),
                graceful_shutdown_timeout=GRACE,
                tuner=slots.tuner(seats, HostTerm(seats.folder / ".term", 60), boots=8)
                if boots
                else None,
            )
            await workers.enter_async_context(worker)
        await workers.enter_async_context(workflow_worker(client, checking_runner()))
        yield


def _seated(seats: Seats, stages: Stages, agent: Callable[[], Any]) -> None:
    """Stages that take a seat at boot and release it at capture."""

    def sandbox(attempt: Attempt) -> str:
        return f"p-{attempt.request.sample_index}-agent-{attempt.attempt}"

    async def boot(attempt: Attempt) -> Booted:
        seats.take(sandbox(attempt))
        return Booted(host=HOST)

    async def run(_: Attempt) -> AgentRun:
        await agent()
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    async def capture(attempt: Attempt) -> Captured:
        seats.leave(sandbox(attempt))
        return Captured(size=10, files=1, empty=False)

    stages.override |= {"boot_sandbox": boot, "run_agent": run, "capture_diff": capture}


@pytest.mark.longer
async def test_who_waits_for_a_seat_is_not_judged(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rollouts per seat wait longer than any timeout, and all are graded in attempt 1."""
    monkeypatch.setattr(activity_options, "HOST_UNREACHABLE_AFTER", SILENT)
    seats, stages, at_work, most = Seats(tmp_path, SEATS), Stages(), 0, 0

    async def agent() -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(SILENT.total_seconds())
        at_work -= 1

    _seated(seats, stages, agent)
    async with host(client, seats, stages):
        handles = [await Perdure(client).start_rollout(_request(n)) for n in range(ROLLOUTS)]
        episodes = await asyncio.gather(*(handle.result() for handle in handles))

    assert {(one.status, one.attempts) for one in episodes} == {(RolloutStatus.GRADED, 1)}
    assert most == SEATS


async def test_a_rollout_that_expires_in_the_queue_ends(client: Client, tmp_path: Path) -> None:
    """If no seat becomes free in time, the rollout ends as expired, and nothing was booted."""
    stages, full = Stages(), Seats(tmp_path, 1)
    full.take("p-0-agent-1")
    async with host(client, full, stages):
        handle = await Perdure(client).start_rollout(_request(expires_at=time.time()))
        episode = await handle.result()

    assert (episode.status, stages.names()) == (RolloutStatus.EXPIRED, ["emit_episode"])


async def test_a_list_tells_who_waits_from_who_boots(client: Client, tmp_path: Path) -> None:
    """Without a seat a rollout is listed as waiting, and a boot that takes long is listed as
    boot."""
    stages, seats, told = Stages(), Seats(tmp_path, 1), asyncio.Event()
    seats.take("p-9-agent-1")

    async def boot(attempt: Attempt) -> Booted:
        rollout = client.get_workflow_handle(attempt.request.workflow_id)
        await rollout.signal(temporal_names.BOOTING, attempt.attempt)
        await told.wait()
        return Booted()

    stages.override["boot_sandbox"] = boot
    async with host(client, seats, stages):
        rollout = await Perdure(client).start_rollout(_request())

        async def listed(stage: str) -> bool:
            found = (await rollout.handle.describe()).typed_search_attributes
            return found.get(attributes.STAGE) == stage

        await until(lambda: listed("waiting"), "it is listed as waiting")
        assert (await rollout.handle.query("state"))["stage"] == "waiting"
        seats.leave("p-9-agent-1")
        await until(lambda: listed("boot"), "it is listed as booting")
        told.set()

        assert (await rollout.result()).status is RolloutStatus.GRADED


async def test_a_run_counts_rollouts_without_a_seat_as_waiting(
    client: Client, tmp_path: Path
) -> None:
    """Two open rollouts without a seat do not count as running. Both run when there is a seat."""
    stages, seats = Stages(), Seats(tmp_path, 1)
    stages.instances = ("toy/add-1",)
    seats.take("p-9-agent-1")
    asked = RunRequest(run_id="r1", instances=("toy/add-1",), n_samples=2, rollout={"agent": "nop"})
    async with host(client, seats, stages):
        run = await Perdure(client).start_run(asked)

        async def both_wait() -> bool:
            progress = await run.progress()
            return (progress.started, progress.running) == (2, 0)

        await until(both_wait, "both wait")
        seats.leave("p-9-agent-1")
        await run.result()

        assert (await run.progress()).done == 2
