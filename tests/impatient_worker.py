"""`python -m tests.impatient_worker`: a worker that waits seconds, not a minute, for E2B's answers."""

from perdure.sandboxes.providers.e2b import provider as e2b
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from workers.worker_process import main

e2b.DAEMON_GONE_S, e2b.SILENT_S = 10.0, 1.0
E2BProvider.request_s = 4.0  # in the test's own process


if __name__ == "__main__":
    main()
