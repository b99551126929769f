"""A supervised process on a host with a full disk or without free processes."""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

from perdure.stack.child_restarts import Child, ChildSpec
from perdure.stack.stack_state import ChildState

PATIENCE_S = 120.0


async def killed(child: Child) -> ChildState:
    """Kill a child and return the state of the process that replaces it."""
    assert child.state is not None
    before = child.state.restarts
    os.kill(child.state.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while child.state.restarts == before:
            await asyncio.sleep(0.01)
    return child.state


async def test_a_full_disk_does_not_end_the_restarts(tmp_path: Path) -> None:
    """If the state cannot be written after a restart, the child is restarted again later."""
    full = False

    def changed() -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = ChildSpec("part", (sys.executable, "-c", "import signal; signal.pause()"), os.environ)
    child = Child(spec, tmp_path, changed)
    await child.start()
    try:
        full = True
        await killed(child)
        second = await killed(child)

        assert (second.restarts, second.process.alive) == (2, True)
    finally:
        await child.stop()
