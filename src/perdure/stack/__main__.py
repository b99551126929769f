"""`python -m perdure.stack`: the supervisor of one stack."""

import os
import sys

from perdure.stack import supervisor

if __name__ == "__main__":
    code = supervisor.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
