"""The e2b provider keeps the sandbox contract: the real SDK against the double."""

from tests.service_harness import E2B, ServiceContract


class TestE2B(ServiceContract):
    service = E2B
    bounds_memory = False  # the template sets it
