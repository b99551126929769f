"""Every agent from its registry, while an engine refuses calls in the middle of its work."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from perdure.agents.base import Agent
from perdure.agents.claude_code import ClaudeCode
from perdure.agents.codex import Codex
from perdure.agents.gemini_cli import GeminiCli
from perdure.agents.mini_swe_agent import MiniSweAgent
from perdure.agents.opencode import Opencode
from perdure.agents.openhands import Openhands
from perdure.agents.qwen_code import QwenCode
from perdure.errors import MissingDependency
from perdure.testing.agent_stand import Run, Stand, call, script
from perdure.testing.scripted_engine import Faults, ScriptedEngine
from perdure.types import Outcome
from tests.agents import (
    test_claude_code,
    test_codex,
    test_gemini_cli,
    test_opencode,
    test_openhands,
    test_qwen_code,
)

pytestmark = pytest.mark.registry

AWAY_S = 15.0
STATUSES = (301, 302, 401, 402, 403, 404, 407, 413, 422, 451, 507, 520)


def _bash(command: str) -> dict[str, Any]:
    return call("bash", "Now.", command=command)


SOLVES = {
    ClaudeCode: script(test_claude_code.READ, test_claude_code.EDIT, test_claude_code.CHECK, test_claude_code.DONE),
    Codex: script(test_codex.READ, test_codex.EDIT, test_codex.CHECK, test_codex.DONE),
    Opencode: script(test_opencode.READ, test_opencode.EDIT, test_opencode.CHECK, test_opencode.DONE),
    QwenCode: test_qwen_code.of(test_qwen_code.READ, test_qwen_code.EDIT, test_qwen_code.CHECK, test_qwen_code.DONE),
    GeminiCli: script(test_gemini_cli.READ, test_gemini_cli.EDIT, test_gemini_cli.CHECK, test_gemini_cli.DONE),
    Openhands: script(test_openhands.READ, test_openhands.EDIT, test_openhands.CHECK, test_openhands.DONE),
    MiniSweAgent: script(
        _bash("cat calc.py"),
        _bash("sed -i 's/a - b/a + b/' calc.py"),
        _bash("python3 -B -c 'import calc; print(calc.add(1, 2))'"),
        _bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
}  # fmt: skip


@pytest.fixture(params=SOLVES, ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest, stand: Stand) -> Agent:
    found: Agent = request.param()
    if isinstance(found, Openhands):
        try:
            found.check_host(stand.agents)
        except MissingDependency as missing:
            pytest.skip(str(missing))
    return found


class Refusals:
    """Faults of an engine: each next call is refused with the next status."""

    every, times = 1, sys.maxsize

    def __init__(self, *statuses: int) -> None:
        self._left = list(statuses)

    @property
    def kind(self) -> str | None:
        return "status" if self._left else None

    @property
    def status(self) -> int:
        return self._left.pop(0)


def _solved(run: Run) -> tuple[Outcome, str, str]:
    """The verdict, and what would withhold it."""
    return run.grade.outcome, run.summary.unanswered, run.summary.refused


RIGHT = (Outcome.RESOLVED, "", "")


async def test_every_status_once_costs_a_rollout_nothing(stand: Stand, agent: Agent) -> None:
    """Four of twelve statuses come between each two turns; the agent solves its task."""
    left = iter([STATUSES[:4], STATUSES[4:8], STATUSES[8:]])

    def sampled(engine: ScriptedEngine, left: Iterator[tuple[int, ...]] = left) -> None:
        engine.faults = cast(Faults, Refusals(*next(left, ())))

    run = await stand.run(agent, SOLVES[type(agent)], sampled=sampled)

    assert _solved(run) == RIGHT, run.said
    assert next(left, None) is None
    run.assert_token_exact()


@pytest.mark.parametrize("status", STATUSES)
async def test_an_engine_that_refuses_for_a_while_is_waited_for(
    stand: Stand, agent: Agent, status: int
) -> None:
    """Probes are refused too. The agent solves its task once the engine samples again."""
    turns: list[ScriptedEngine] = []

    def sampled(engine: ScriptedEngine) -> None:
        turns.append(engine)
        if len(turns) == 2:
            engine.control(kind="status", status=status)
            loop = asyncio.get_running_loop()
            loop.call_later(AWAY_S, lambda: engine.control(kind=None))

    run = await stand.run(agent, SOLVES[type(agent)], sampled=sampled)

    assert _solved(run) == RIGHT, run.said
    run.assert_token_exact()


async def test_another_engine_takes_the_work_of_one_that_refuses(
    stand: Stand, agent: Agent
) -> None:
    """From the second turn on, the engine that had the session answers 403 to everything."""
    refusing: list[ScriptedEngine] = []

    def sampled(engine: ScriptedEngine) -> None:
        if not refusing:
            engine.control(kind="status", status=403)
            refusing.append(engine)

    run = await stand.run(agent, SOLVES[type(agent)], sampled=sampled, engines=2)

    assert _solved(run) == RIGHT, run.said
    assert len(refusing[0].calls) == 1
    run.assert_token_exact()
