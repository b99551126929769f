"""The wall clock of a host jumps by two hours while agents are at work: workers, gateway, keepers.

libfaketime moves it for their processes alone. Temporal's server keeps the true time.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.sandboxes.host.keeper.keeper import LOOK_S
from tests.stack.host import why_not_here
from tests.stack.stack import Stack, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
TWO_HOURS = 7200
READ_CLOCK = (sys.executable, "-c", "import time; print(time.time())")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    if LIBRARY is None:
        pytest.skip("libfaketime is missing: apt-get install faketime")
    home = tmp_path_factory.mktemp("stack")
    faked = {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(home / "clock"),
        "FAKETIME_NO_CACHE": "1",
        # As for a real jump: times of files stay, and so does the monotonic clock.
        "NO_FAKE_STAT": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    _set_clock(home, 0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in faked.items():
            patch.setenv(name, value)
        async with running(home) as stack:
            yield stack


def _set_clock(home: Path, seconds: int) -> None:
    draft = home / "clock.draft"
    draft.write_text(f"{seconds:+d}\n")
    draft.replace(home / "clock")


def _shown_by_clock() -> float:
    """Seconds that the clock of a new process is ahead of ours, which was loaded without the library."""
    told = subprocess.run(READ_CLOCK, env=os.environ, capture_output=True, check=True).stdout
    return float(told) - time.time()


@pytest.mark.parametrize("jump", [TWO_HOURS, -TWO_HOURS], ids=["forward", "back"])
async def test_a_jump_of_two_hours_ends_nothing(stack: Stack, jump: int) -> None:
    """Agents in the middle of a turn go on, a sweep kills nobody, and a rollout that has ten minutes
    to begin still begins; all are solved in their first attempt."""
    _set_clock(stack.home, 0)
    stack.engine.hold(3)
    before = [await stack.start(f"jump{jump}-{number}") for number in range(2)]
    await stack.held(*before)
    agents = stack.agents()
    _set_clock(stack.home, jump)
    assert _shown_by_clock() == pytest.approx(jump, abs=60)
    await asyncio.sleep(LOOK_S + 1)  # every keeper has looked at its deadline
    swept = await stack.sweep(grace_s=600)
    late = await stack.start(f"late{jump}", expires_at=time.time() + 600)
    await stack.held(late)

    assert (swept.killed, swept.failed) == (0, 0)
    assert agents < stack.agents()
    stack.engine.let_go()
    for request in (*before, late):
        await stack.solved_once(request)
