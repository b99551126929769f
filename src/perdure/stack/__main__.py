"""`python -m perdure.stack`: the supervisor of one stack."""

import os
import sys

from perdure.stack import stack_supervisor

if __name__ == "__main__":
    code = stack_supervisor.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
