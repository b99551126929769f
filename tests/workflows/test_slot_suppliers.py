"""The SDK runs our slots in Python next to heartbeats. The oldest version that we allow must not lock
up: with 1.30, this test ends at its limit."""

import subprocess
import sys

import pytest
from temporalio.client import Client

from tests.workflows import heartbeating_worker

LIMIT_S = 200.0


@pytest.mark.longer
async def test_a_worker_with_its_own_slots_survives_heartbeats(client: Client) -> None:
    address, namespace = client.service_client.config.target_host, client.namespace
    command = [sys.executable, heartbeating_worker.__file__, address, namespace]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)

    assert done.stdout.decode().strip() == str(heartbeating_worker.ACTIVITIES), done.stderr.decode()
