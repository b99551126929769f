"""A real Temporal dev server for each test; activities are replaced by name, nothing else is."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from perdure.client import names
from tests.workflows import dev_server
from tests.workflows.stages import Stages
from workers.orchestration import checking_runner, workflow_worker

HEARD_WITHIN = timedelta(seconds=0.2)
"""A stage that beats learns of its cancellation so soon, though its time-out is long: on a busy host
a short one takes stages that live for dead, and they are counted twice."""


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """One server per test: half a second each, and no state to trip over."""
    async with dev_server.serving() as client:
        yield client


@pytest.fixture
async def stages(client: Client) -> AsyncIterator[Stages]:
    """Workers on every queue: the real workflow worker, stand-in activities."""
    stages = Stages()
    queues = [
        names.BOOT_QUEUE,
        names.AGENT_QUEUE,
        names.GRADE_QUEUE,
        names.IO_QUEUE,
        names.host_queue("host-1"),
    ]
    workers = [
        Worker(
            client,
            task_queue=queue,
            activities=stages.activities(),
            max_heartbeat_throttle_interval=HEARD_WITHIN,
        )
        for queue in queues
    ]
    workers.append(workflow_worker(client, checking_runner()))
    async with workers[0], workers[1], workers[2], workers[3], workers[4], workers[5]:
        yield stages
