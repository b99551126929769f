"""The host's power fails while agents work: after its start the same command goes on."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.types import Outcome, RolloutStatus
from tests.power_cut import FragileDisk
from tests.stack.host_requirements import pids, why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import nothing

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def disk(tmp_path: Path) -> AsyncIterator[FragileDisk]:
    disk = FragileDisk(tmp_path)
    yield disk
    await nothing(lambda: end_all(disk.path))
    disk.remove()


@pytest_asyncio.fixture(loop_scope="module")
async def on_disk(disk: FragileDisk) -> AsyncIterator[Stack]:
    """A stack whose whole home is on that disk."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(disk.path / "home") as stack:
        yield stack


def processes_of(home: Path) -> list[int]:
    """All that were started with the path of this home, sandboxes included."""
    return [pid for pid in pids() if pid != os.getpid() and _names(pid, os.fsencode(home))]


def _names(pid: int, path: bytes) -> bool:
    try:
        folder = Path(f"/proc/{pid}")
        told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        return path in told or path in os.fsencode(os.readlink(folder / "cwd"))
    except OSError:  # it has ended, or belongs to the kernel
        return False


def end_all(home: Path) -> list[int]:
    """Kill them; returns those that are left to be killed again."""
    found = processes_of(home)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


async def test_after_a_power_cut_every_verdict_is_right(disk: FragileDisk, on_disk: Stack) -> None:
    """In the first seconds of a row, when no data of its environment has been written back. The cut
    takes Temporal's database, the journals and the sandboxes too."""
    stack = on_disk
    requests = await stack.met("cut", 2)
    await nothing(lambda: end_all(stack.home))
    disk.cut_power()
    await stack.recover()
    for request in requests:
        await stack.perdure.start_rollout(request)
    stack.engine.let_go()
    episodes = [await stack.episode(request) for request in requests]
    verdicts = [(episode.status, episode.outcome, episode.reward) for episode in episodes]

    assert verdicts == [(RolloutStatus.GRADED, Outcome.RESOLVED, 1.0)] * 2
