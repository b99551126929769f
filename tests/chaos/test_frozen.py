"""A worker that is frozen for longer than its heartbeat time-out and then wakes up: a zombie.

Meanwhile another worker has its work. What the zombie still writes must change nothing.
"""

import os
import signal

import pytest

from tests.stack.made_instances import SLOW_INSTANCE
from tests.stack.running_stack import Stack
from tests.stack.stack_process import Process
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def woken(worker: Process) -> None:
    """The process continues, finds that another one has its work, and can be stopped."""
    os.kill(worker.pid, signal.SIGCONT)
    assert await worker.kill(signal.SIGTERM) == 0


async def test_a_frozen_watcher_comes_back_too_late(stack: Stack) -> None:
    """The agent was taken over, captured and graded; the late watcher leaves all of it alone."""
    [request] = await stack.met("frozen-watcher")
    (frozen,) = stack.workers
    os.kill(frozen.pid, signal.SIGSTOP)
    await stack.start_worker()
    await stack.watched(request, attempt=2)
    stack.engine.let_go()
    await stack.solved_once(request)
    before = await stack.episode(request)
    files = await stack.files(request)
    await woken(frozen)

    assert await stack.episode(request) == before
    assert await stack.files(request) == files
    await stack.solved_once(request)


async def test_a_frozen_grader_comes_back_in_the_middle(stack: Stack) -> None:
    """Both may meet in one sandbox; in the end there is one verdict, the right one."""
    request = await stack.start("frozen-grader", instance=SLOW_INSTANCE)
    await until(lambda: stack.box(request, "grade").alive, "the grading sandbox is up")
    (frozen,) = stack.workers
    os.kill(frozen.pid, signal.SIGSTOP)
    await stack.start_worker()
    await stack.at(request, "grade_in_fresh_sandbox", attempt=2)
    await woken(frozen)

    await stack.solved_once(request)
