"""The modal provider keeps the sandbox contract: the real SDK against the double."""

import pytest

from tests.service_harness import MODAL, ServiceContract


@pytest.mark.longer
class TestModal(ServiceContract):
    service = MODAL
    runs_commands_as = "TestE2B"
    large_file_mb = 64  # client and server of the service share this process
    at_once = 16  # each is several processes on this host
