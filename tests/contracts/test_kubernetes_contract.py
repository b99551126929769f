"""The kubernetes provider keeps the sandbox contract: the real client against the double."""

from tests.service_harness import KUBERNETES, ServiceContract


class TestKubernetes(ServiceContract):
    service = KUBERNETES
    runs_commands_as = "TestE2B"
    large_file_mb = 64  # client and server of the socket share this process
    at_once = 16
