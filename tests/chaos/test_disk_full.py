"""The store's disk is full: rollouts wait and say why; with room again, they finish."""

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.episodes.episode import Episode
from perdure.storage import store_keys
from tests.stack.gated_engine import TURNS
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BALLAST = "ballast"


@pytest_asyncio.fixture(loop_scope="module")
async def small_disk(tmp_path: Path) -> AsyncIterator[Path]:
    """A mounted disk of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "perdure-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest_asyncio.fixture(loop_scope="module")
async def cramped(tmp_path: Path, small_disk: Path) -> AsyncIterator[Stack]:
    """A stack whose store is on that disk."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path / "home", store=small_disk / "store") as stack:
        yield stack


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / BALLAST).open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


@pytest.mark.parametrize("turn", [0, TURNS - 1], ids=["agent", "end-of-agent"])
async def test_a_full_store_keeps_the_rollout_waiting(
    cramped: Stack, small_disk: Path, turn: int
) -> None:
    """Its model call waits, Temporal's pending activity shows the reason, no torn file is left, and the
    rollout ends resolved."""
    cramped.engine.hold(turn)
    request = await cramped.start("full")
    await cramped.held(request)
    fill(small_disk)
    cramped.engine.let_go()

    async def says_why() -> bool:
        found = await cramped.pending(request)
        reports = found.heartbeat_details.payloads if found else ()
        return any(b"No space left on device" in report.data for report in reports)

    await until(says_why, "the rollout says why it waits")
    written = [key async for key in cramped.store.list(store_keys.rollout_of(request))]
    assert [key for key in written if not (await cramped.store.get(key)).data] == []
    (small_disk / BALLAST).unlink()

    await cramped.solved_once(request)
    stored = await cramped.store.get(store_keys.episode(request))
    assert Episode.model_validate_json(stored.data).reward == 1.0
