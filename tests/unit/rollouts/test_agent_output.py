"""How the end of an agent is reported."""

import pytest

from perdure.agents.base import Evidence
from perdure.agents.mini_swe_agent import MiniSweAgent
from perdure.rollouts.agent_output import LAST_LINE, detail, end_of
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.types import AgentEnd

KILLED = ExecStatus(ExecState.KILLED, cause="signal", signal=9)


def told(stderr: str) -> str:
    return detail(AgentEnd.CRASHED, Evidence(KILLED, b"", stderr.encode(), {}, 0))


def test_a_long_last_line_is_cut_between_words() -> None:
    """The beginning of the line says what failed, and neither end is cut inside a word."""
    line = "litellm.APIError: " + "the endpoint refused it " * 20

    assert told("first\nlitellm.APIError: no") == "killed by signal; litellm.APIError: no"
    cut = told(f"first\n{line}\n").removeprefix("killed by signal; ")
    assert line.startswith(cut.removesuffix(" …") + " ")
    assert len(cut) <= 202
    assert told("word " * LAST_LINE).startswith("killed by signal; … word word")


@pytest.mark.parametrize(
    ("called", "end"), [(True, AgentEnd.CRASHED), (False, AgentEnd.NEVER_CALLED_MODEL)]
)
async def test_an_agent_whose_calls_got_no_answer_has_called(called: bool, end: AgentEnd) -> None:
    """The agent counts as crashed, not as one that never called the model."""
    evidence = Evidence(KILLED, b"", b"", {}, 0)

    assert await end_of(MiniSweAgent(), evidence, called=called) is end
