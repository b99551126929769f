"""Agents that a program of Perdure starts: their command, refused flags, and how their end is read."""

import pytest

from perdure.agents.base import Agent
from perdure.agents.openhands import Openhands
from perdure.agents.r2e_gym import R2eGym
from perdure.agents.smolagents import Smolagents
from perdure.agents.terminus_2 import Terminus2
from perdure.errors import ConfigurationError
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options

OPENHANDS, R2E_GYM, SMOLAGENTS, TERMINUS_2 = AGENTS = (
    Openhands(),
    R2eGym(),
    Smolagents(),
    Terminus2(),
)
every_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)


@every_agent
def test_it_runs_isolated_on_its_own_python(agent: Agent) -> None:
    """No file of the repository shadows its imports."""
    folder = f"/opt/{agent.name}"
    program = f"{folder}/{agent.name}_run.py"

    assert agent.launch(TASK).argv[4:7] == (f"{folder}/bin/python", "-I", program)


@every_agent
@pytest.mark.parametrize("option", ["extra_args", "SWE_CLAUDE_EXTRA_ARGS"])
def test_flags_are_refused(agent: Agent, option: str) -> None:
    """They would have no effect, because its program takes none."""
    message = rf"{option}: must be empty.*no flags.*{agent.name} takes"
    with pytest.raises(ConfigurationError, match=message):
        agent.launch(with_options(**{option: "--verbose"}))


@pytest.mark.parametrize(
    ("agent", "status", "expected"),
    [
        (OPENHANDS, "finished", AgentEnd.FINISHED),
        (OPENHANDS, "stuck", AgentEnd.GAVE_UP),
        (OPENHANDS, "MaxIterationsReached", AgentEnd.LIMIT),
        (OPENHANDS, "LLMContextWindowExceedError", AgentEnd.LIMIT),
        (OPENHANDS, "LLMServiceUnavailableError", AgentEnd.CRASHED),
        (R2E_GYM, "agent", AgentEnd.FINISHED),
        (R2E_GYM, "abs_step_limit", AgentEnd.LIMIT),
        (R2E_GYM, "token_limit", AgentEnd.LIMIT),
        (SMOLAGENTS, "success", AgentEnd.FINISHED),
        (SMOLAGENTS, "max_steps_error", AgentEnd.LIMIT),
        (SMOLAGENTS, "context_full", AgentEnd.LIMIT),
        (TERMINUS_2, "complete", AgentEnd.FINISHED),
        (TERMINUS_2, "max_turns", AgentEnd.LIMIT),
        (TERMINUS_2, "shell_left", AgentEnd.GAVE_UP),
        *((agent, status, AgentEnd.CRASHED) for agent in AGENTS for status in ("", [], ["x"])),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_its_end_is_read_from_its_last_line(
    agent: Agent, status: object, expected: AgentEnd
) -> None:
    """An unknown status is a crash, and so is any status with a failed exit."""
    last = said(kind="perdure_end", status=status, error="")

    assert agent.classify(ended(last)) is expected
    assert agent.classify(ended(last, code=1)) is AgentEnd.CRASHED
