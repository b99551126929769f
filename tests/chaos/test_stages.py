"""The worker dies with signal 9 at every write of every stage: before it, and after it.

After a write is the lost answer: the work is done, and Temporal is never told.
"""

import signal

import pytest
from temporalio.client import WorkflowFailureError

from perdure.types import RolloutStatus
from tests.stack.made_instances import SLOW_INSTANCE
from tests.stack.running_stack import Stack
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOMENTS = [
    ("before", "*/sandbox.json"),
    ("after", "*/sandbox.json"),
    ("before", "*/agent/commands.log"),
    ("before", "*/agent.json"),
    ("after", "*/agent.json"),
    ("before", "*/patch.diff"),
    ("after", "*/patch.diff"),
    ("after", "*/patch.json"),
    ("before", "*/tests-*.log"),
    ("before", "*/grade-*.json"),
    ("after", "*/grade-*.json"),
    ("before", "*/episode.parquet"),
    ("after", "*/episode.parquet"),
    ("after", "*/episode.json"),
]


@pytest.mark.parametrize(("when", "key"), MOMENTS, ids=[f"{w}-{k[2:]}" for w, k in MOMENTS])
async def test_the_worker_dies_at_a_write(stack: Stack, when: str, key: str) -> None:
    """Another worker continues from the last checkpoint: solved, nothing done twice, nothing
    left."""
    await stack.workers[0].kill(signal.SIGTERM)
    dying = await stack.start_worker("tests.dying_worker", when, key)
    request = await stack.start(f"{when}-{MOMENTS.index((when, key))}")
    assert await dying.ended() == -signal.SIGKILL
    await stack.start_worker()

    await stack.solved_once(request)


async def test_the_worker_dies_in_the_middle_of_grading(stack: Stack) -> None:
    """The half-used sandbox is replaced by a fresh one, and both are gone in the end."""
    request = await stack.start("mid-grade", instance=SLOW_INSTANCE)
    await until(lambda: stack.box(request, "grade").alive, "the grading sandbox is up")
    await stack.workers[0].kill()
    await stack.start_worker()

    await stack.solved_once(request)


async def test_grading_may_finish_within_the_grace_of_its_worker(stack: Stack) -> None:
    """SIGTERM in the middle of a short grading: it is finished, not begun again elsewhere."""
    request = await stack.start("grade-in-grace", instance=SLOW_INSTANCE)
    await until(lambda: stack.box(request, "grade").alive, "the grading sandbox is up")
    (first,) = stack.workers
    await stack.start_worker()

    assert await first.kill(signal.SIGTERM) == 0
    await stack.solved_once(request)
    assert (await stack.episode(request)).evictions == 0


async def test_cancelled_while_the_worker_is_dead(stack: Stack) -> None:
    """The killed worker could not hear of the cancellation: the next one cleans up and keeps the
    turns."""
    [request] = await stack.met("cancel-dead")
    await stack.workers[0].kill()
    await stack.perdure.rollout(request.workflow_id).cancel()
    await stack.start_worker()

    with pytest.raises(WorkflowFailureError):
        await stack.handle(request).result()
    episode = await stack.episode(request)
    assert (episode.status, episode.turns) == (RolloutStatus.CANCELLED, 3)
    await stack.nothing_left()
