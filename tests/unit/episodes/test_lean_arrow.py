"""A gateway and a worker use pyarrow in a child process, without numpy, pandas and its allocator."""

import subprocess
import sys

from perdure.apart.working import work
from tests.lean_arrow_in_child import loaded
from tests.paths import ROOT

CLOSES = """
import asyncio, sys
import perdure.gateway.sessions
import workers.process, workers.queues
from perdure.apart.working import work
from perdure.gateway.journal.turns_file import turns_file
workers.process.import_what_stages_need()
made = asyncio.run(work(turns_file, []))
print("pyarrow" in sys.modules, made == turns_file([]))
"""
ELSEWHERE = """
from perdure.episodes import lean_arrow
lean_arrow.set_up()
import pyarrow
print(pyarrow.table({"a": [7]}).to_pandas().a[0])
"""


async def test_a_child_leaves_numpy_and_pandas_out() -> None:
    """Turns are written and read without them."""
    assert await work(loaded) == ("system", [])


def test_a_gateway_that_closes_a_session_imports_no_pyarrow() -> None:
    """A child writes the turns of the session; a worker imports none either."""
    assert _printed(CLOSES) == ["False", "True"]


def test_no_other_process_loses_numpy() -> None:
    """In a trainer's process, or one that loads an extension, pyarrow is whole."""
    assert _printed(ELSEWHERE) == ["7"]


def _printed(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        cwd=ROOT,
        text=True,
        timeout=240,
    )
    return done.stdout.split()
