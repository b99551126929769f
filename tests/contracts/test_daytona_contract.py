"""The daytona provider keeps the sandbox contract: the real SDK against the double."""

import pytest

from tests.service_harness import DAYTONA, ServiceContract


@pytest.mark.longer
class TestDaytona(ServiceContract):
    service = DAYTONA
    runs_commands_as = "TestE2B"
    bounds_memory = False  # the snapshot sets it
    shortest_life_s = None  # the service counts in minutes
