"""A host that refuses forks and threads now and then, below the worker and all its sandboxes."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.types import Outcome, RolloutStatus
from tests.pids_group import PidsGroup
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE, UNSOLVED_INSTANCE
from tests.stack.running_stack import Stack, running

ROOM = 40
"""In a shortage fewer new processes than this can start. A few rollouts need as many."""
SHORTAGES = 60
RIGHT = {INSTANCE: (Outcome.RESOLVED, 1.0), UNSOLVED_INSTANCE: (Outcome.UNRESOLVED, 0.0)}


@pytest.fixture
def pids() -> Iterator[PidsGroup]:
    group = PidsGroup()
    yield group
    group.remove()


async def worker_in(pids: PidsGroup, stack: Stack) -> None:
    worker = await stack.start_worker()
    pids.add(worker.pid)


async def starve(pids: PidsGroup, stack: Stack, drawn: random.Random) -> None:
    """Shortages one after another. A worker that does not survive one is started again."""
    for _ in range(SHORTAGES):
        pids.leave_room(drawn.randrange(ROOM))
        await asyncio.sleep(drawn.uniform(0.02, 0.6))
        pids.unlimit()
        if not stack.workers:
            await worker_in(pids, stack)
        await asyncio.sleep(drawn.uniform(0.02, 0.6))


async def test_no_verdict_comes_of_refused_processes(
    tmp_path: Path, pids: PidsGroup, seed: int, rollouts: int
) -> None:
    """Each rollout ends with the reward that it is due, or without one."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path / "home", workers=0, beat_s=6.0) as stack:
        await worker_in(pids, stack)
        rows = [UNSOLVED_INSTANCE if n % 4 == 0 else INSTANCE for n in range(rollouts)]
        asked = [
            await stack.start("starved", sample_index=n, instance=row) for n, row in enumerate(rows)
        ]
        await starve(pids, stack, random.Random(seed))
        episodes = [await stack.episode(request) for request in asked]

        wrong = [
            (row, episode)
            for row, episode in zip(rows, episodes, strict=True)
            if episode.status is RolloutStatus.GRADED
            and (episode.outcome, episode.reward) != RIGHT[row]
        ]
        assert not wrong, stack.last_words()
        assert pids.refusals
        await stack.nothing_left()
