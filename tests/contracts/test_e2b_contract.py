"""The e2b provider keeps the sandbox contract: the real SDK against the double."""

from tests.service_harness import E2B, ServiceContract


class TestE2B(ServiceContract):
    service = E2B
    bounds_memory = False  # the template sets it
    large_file_mb = 64  # client and server of the service share this process
    at_once = 16  # each is several processes on this host
