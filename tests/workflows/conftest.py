"""The real workflows. Only the activities are replaced, by name."""

from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client

from tests.workflows.scripted_stages import Stages


@pytest.fixture
async def stages(client: Client) -> AsyncIterator[Stages]:
    """Workers on every queue: the real workflow worker, and stand-in activities."""
    stages = Stages()
    async with stages.at_work(client):
        yield stages
