"""`python -m tests.hasty_worker SECONDS`: a worker to whose rollouts a host's silence of SECONDS is long."""

import sys
from datetime import timedelta

from workers.worker_process import main
from workflows import activity_options

activity_options.HOST_UNREACHABLE_AFTER = timedelta(seconds=float(sys.argv.pop(1)))

if __name__ == "__main__":
    main()
