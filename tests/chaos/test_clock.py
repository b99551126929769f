"""The wall clock of a host jumps by two hours while agents are at work: workers, gateway, keepers.

libfaketime moves it for their processes alone. Temporal's server keeps the true time.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from perdure.sandboxes.host.keeper.sandbox_keeper import LOOK_S
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.shifted_clock import MISSING, TWO_HOURS, Clock

pytestmark = pytest.mark.asyncio(loop_scope="module")
READ_CLOCK = (sys.executable, "-c", "import time; print(time.time())")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Stack, Clock]]:
    if missing := why_not_here():
        pytest.skip(missing)
    if MISSING:
        pytest.skip(MISSING)
    home = tmp_path_factory.mktemp("stack")
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(home, patch)
        async with running(home) as stack:
            yield stack, clock


def _shown_by_clock() -> float:
    """Seconds that the clock of a new process is ahead of ours, which was loaded without the library."""
    told = subprocess.run(READ_CLOCK, env=os.environ, capture_output=True, check=True).stdout
    return float(told) - time.time()


@pytest.mark.parametrize("jump", [TWO_HOURS, -TWO_HOURS], ids=["forward", "back"])
async def test_a_jump_of_two_hours_ends_nothing(shared: tuple[Stack, Clock], jump: int) -> None:
    """Agents in the middle of a turn go on, a sweep kills nobody, and a rollout that has ten minutes
    to begin still begins; all are solved in their first attempt."""
    stack, clock = shared
    await stack.refresh()
    clock.jump(0)
    before = await stack.met(f"jump{jump}", 2)
    agents = stack.agents()
    clock.jump(jump)
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
