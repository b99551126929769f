"""A gateway and a worker use pyarrow in a child process, without pandas and without its allocator."""

import subprocess
import sys

from tests.paths import ROOT

PROGRAM = """
import sys
from perdure.episodes import lean_arrow
lean_arrow.set_up()
lean_arrow.set_up()
import pyarrow
from perdure.episodes.turns_parquet import decode, encode
from perdure.types import Turn
decode(encode([Turn(index=0, prompt_ids=(1,), completion_ids=(2,), logprobs=(-0.5,))]))
print(pyarrow.default_memory_pool().backend_name, "pandas" in sys.modules)
print(pyarrow.table({"a": [7]}).to_pandas().a[0])
"""

CLOSES = """
import asyncio, sys
import perdure.gateway.sessions
import workers.process, workers.queues
from perdure.apart.working import work
from perdure.gateway.journal.turns_file import turns_file
workers.process.import_what_stages_need()
made = asyncio.run(work(turns_file, []))
print("pyarrow" in sys.modules)
print(made == turns_file([]), "pandas" in sys.modules)
"""


def test_pyarrow_leaves_pandas_out_until_somebody_asks_for_it() -> None:
    """Turns are written and read without pandas, which an extension may still use later."""
    assert _printed(PROGRAM) == ["system", "False", "7"]


def test_a_gateway_that_closes_a_session_imports_no_pyarrow() -> None:
    """A child writes the turns of the session; a worker imports none either."""
    assert _printed(CLOSES) == ["False", "True", "False"]


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
