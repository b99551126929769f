"""A gateway process starts without what nothing in it uses."""

import subprocess
import sys

PROGRAM = """
import sys
from perdure.gateway.__main__ import leave_out_what_is_unused
leave_out_what_is_unused()
import perdure.gateway.http.server
assert "numpy" not in sys.modules  # only engines that take tokens need it
print(*sys.modules)
"""


def test_a_gateway_imports_nothing_that_draws_on_terminals() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True, timeout=240
    )

    assert not {"rich", "pygments"} & set(done.stdout.split())
