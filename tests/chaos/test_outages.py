"""What everything depends on dies with signal 9: Temporal's server, the gateway, all at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from tests.stack.running_stack import Stack
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = 6
OUTAGE_S = 12.0
"""Longer than the rollouts' heartbeats (3 s) and than a plain Temporal client is patient (10 s)."""


async def test_the_server_is_killed_and_comes_back(stack: Stack) -> None:
    """kill -9 of Temporal's server mid-turn, started again on its file: the rollout continues."""
    (request,) = await stack.met("server-killed")
    await stack.temporal.kill()
    await stack.start_temporal()
    stack.engine.let_go()

    await stack.solved_once(request)


async def test_the_server_is_away_for_longer_than_a_heartbeat(stack: Stack) -> None:
    """The agent finishes while Temporal is down; the server comes back and accepts the finished
    work.

    A caller that waits through the SDK sees no error: the wait goes on.
    """
    (request,) = await stack.met("server-away")
    waiting = asyncio.create_task(stack.perdure.rollout(request.workflow_id).result())
    await stack.temporal.kill()
    stack.engine.let_go()
    await until(lambda: not stack.agents(), "the agent is done")
    await asyncio.sleep(OUTAGE_S)  # not a wait for anything: the outage itself
    await stack.start_temporal()

    await stack.solved_once(request)
    assert (await waiting) == (await stack.episode(request)).ref(stack.store.url)


async def test_the_worker_is_killed_while_the_server_is_away(stack: Stack) -> None:
    """Both are started again; the agent that ran on is met where it is."""
    (request,) = await stack.met("server-and-worker")
    await stack.temporal.kill()
    await stack.workers[0].kill()
    stack.engine.let_go()
    await until(lambda: not stack.agents(), "the agent is done")
    await stack.recover()

    await stack.solved_once(request)


async def test_a_gateway_killed_mid_turn_loses_no_turn(stack: Stack) -> None:
    """The agent asks again; turns that were answered are never sampled again."""
    (request,) = await stack.met("gateway-killed")
    await stack.gateway.kill()
    await stack.start_gateway()
    await until(lambda: len(stack.engine.waiting) >= 2, "the agent has asked again")
    stack.engine.let_go()

    await stack.solved_once(request, again=1)


async def test_a_gateway_that_is_away_keeps_the_rollout_waiting(stack: Stack) -> None:
    """The agent ends, and its session cannot be closed: the watcher says so, and tries again. The gateway
    may have failed the agent's last call, so a second attempt replays all turns."""
    (request,) = await stack.met("gateway-away")
    (worker,) = stack.workers
    os.kill(worker.pid, signal.SIGSTOP)  # it must not close the session before the gateway dies
    stack.engine.let_go()
    await until(lambda: not stack.agents(), "the agent is done")
    await stack.gateway.kill()
    os.kill(worker.pid, signal.SIGCONT)

    async def reason() -> str:
        found = await stack.pending(request)
        return found.last_failure.message if found else ""

    await until(lambda: _contains(reason, "no answer from the gateway"), "it says why it waits")
    await stack.start_gateway()

    await stack.solved_once(request, attempt=2, replayed=stack.engine.turns)


async def _contains(text: Callable[[], Awaitable[str]], part: str) -> bool:
    return part in await text()


async def test_everything_is_killed_at_once(stack: Stack) -> None:
    """Server, worker and gateway: all rollouts finish, only turns in flight are bought again."""
    requests = await stack.met("all-killed", MANY)
    await stack.kill_all(stack.temporal, stack.gateway, *stack.workers)
    await stack.recover()
    stack.engine.let_go()

    for request in requests:
        await stack.solved_once(request, again=1)


async def test_the_machine_goes_down(stack: Stack) -> None:
    """Sandboxes die too, as in a reboot: every rollout is solved in its second attempt,
    which replays what the first had bought."""
    requests = await stack.met("reboot", 3)
    await stack.kill_all(stack.temporal, stack.gateway, *stack.workers)
    # This process forwards calls that wait for a gateway: the next one would get those of dead agents.
    os.kill(int((stack.home / "run" / "life.lock").read_text().split()[0]), signal.SIGKILL)
    keepers = [stack.box(request, "agent").keeper for request in requests]
    for request, keeper in zip(requests, keepers, strict=True):
        await stack.lose(request, "agent")
        assert keeper is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper.pid, signal.SIGKILL)  # its forwarder too would send calls of dead agents
    await stack.recover()
    stack.engine.let_go()

    for request in requests:
        await stack.solved_once(request, attempt=2, replayed=3)
