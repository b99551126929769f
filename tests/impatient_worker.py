"""`python -m tests.impatient_worker`: a worker that waits seconds, not a minute, for E2B's answers."""

from perdure.sandboxes.providers.e2b import provider as e2b
from perdure.sandboxes.providers.e2b.provider import Connection, E2BProvider
from perdure.settings.tree import Settings
from workers.process import main

REQUEST_S = 4.0


def impatient(self: E2BProvider, settings: Settings) -> None:
    patient(self, settings)
    self.connection = Connection(request_s=REQUEST_S)


patient = E2BProvider.__init__
e2b.DAEMON_GONE_S, e2b.SILENT_S = 10.0, 1.0
E2BProvider.__init__ = impatient  # type: ignore[method-assign]  # in the test's own process


if __name__ == "__main__":
    main()
