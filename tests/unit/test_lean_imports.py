"""Programs that live long leave out what a library imports only because it is installed."""

import subprocess
import sys

LIFE = """
import sys
import workers.host.life
print(*sys.modules)
"""

WORKER = """
import sys
from workers.process import import_what_stages_need
import_what_stages_need()
import workers.queues
print(*sys.modules)
"""

SUPERVISOR = """
import sys
import perdure.stack.supervisor
print(*sys.modules)
"""

LATER = """
import sys
from perdure import lean_imports
lean_imports.for_no_terminal("structlog")
before = "rich" in sys.modules
import rich
print(before, "rich" in sys.modules)
"""


def test_the_signs_of_life_draw_on_no_terminal() -> None:
    assert not {"rich", "pygments", "click", "httpx"} & set(_printed(LIFE))


def test_a_worker_draws_on_no_terminal() -> None:
    modules = _printed(WORKER)

    assert "httpx" in modules
    assert not {"rich", "pygments", "click", "pandas", "pyarrow"} & set(modules)


def test_the_supervisor_does_without_temporals_sdk() -> None:
    """It stays as long as the stack; what it needs of Temporal is done by a process that ends."""
    assert not {"temporalio", "httpx"} & set(_printed(SUPERVISOR))


def test_what_was_left_out_can_be_imported_later() -> None:
    assert _printed(LATER) == ["False", "True"]


def _printed(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=240
    )
    return done.stdout.split()
