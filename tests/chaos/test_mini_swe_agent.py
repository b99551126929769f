"""The real mini-swe-agent from PyPI through the same deaths, in its own sandbox."""

import asyncio

import pytest

from perdure.types import AgentEnd, Outcome
from tests.stack.gated_engine import TURNS, commands
from tests.stack.running_stack import Stack
from tests.stack.wait_until import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.registry]

HELD = 2
INSTALL_LIMIT_S = 300.0


def _script() -> dict[str, object]:
    played = [*commands(), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in played
    ]
    return {"default": {"turns": calls}}


async def test_it_outlives_worker_gateway_and_server(stack: Stack) -> None:
    """kill -9 of all three in mid-turn: the same agent process submits, and the fix is graded."""
    stack.engine.control(scripts=_script())
    stack.engine.hold(HELD)
    request = await stack.start("mini", agent="mini_swe_agent", agent_budget_s=300)
    session = stack.identity(request, "agent")
    waiting = stack.engine.waiting
    await until(lambda: waiting, "the agent is in its third turn", INSTALL_LIMIT_S)
    await stack.kill_all(stack.temporal, stack.gateway, *stack.workers)
    await stack.recover()
    await until(lambda: len(waiting) > 1, "the agent has asked again")
    stack.engine.let_go()
    async with asyncio.timeout(120):
        episode = await stack.episode(request)

    assert (episode.agent_end, episode.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), episode
    assert (len(episode.attempts), episode.turns) == (1, TURNS)
    assert stack.engine.times_sampled() == {
        f"{session}-{turn}": 2 if turn == HELD else 1 for turn in range(TURNS)
    }
    await stack.nothing_left()
