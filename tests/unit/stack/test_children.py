"""A supervised process on a host that has run out of something."""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

from perdure.stack.children import Child, ChildSpec
from perdure.stack.state import ChildState

PATIENCE_S = 120.0


async def killed(child: Child) -> ChildState:
    """What is started again in its place."""
    assert child.state is not None
    before = child.state.restarts
    os.kill(child.state.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while child.state.restarts == before:
            await asyncio.sleep(0.01)
    return child.state


async def test_a_full_disk_ends_no_keeping(tmp_path: Path) -> None:
    """A restart that cannot be written down is not the last one."""
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
