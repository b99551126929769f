"""`python -m perdure.stack`: the supervisor of one stack."""

import os
import sys

from perdure import lean_imports


def main() -> int:
    lean_imports.for_no_terminal("structlog")
    from perdure.stack import supervisor

    return supervisor.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
