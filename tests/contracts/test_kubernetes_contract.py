"""The kubernetes provider keeps the sandbox contract: the real client against the double."""

import pytest

from tests.service_harness import KUBERNETES, ServiceContract


@pytest.mark.longer
class TestKubernetes(ServiceContract):
    service = KUBERNETES
    runs_commands_as = "TestE2B"
    large_file_mb = 64  # client and server of the socket share this process
    at_once = 16
