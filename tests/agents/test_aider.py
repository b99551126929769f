"""Aider from PyPI, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import pytest

from perdure.agents.aider import Aider
from perdure.testing.agent_stand import Stand
from perdure.testing.tool_reading_policy import AIDER_EDIT
from perdure.types import AgentEnd, Outcome

pytestmark = pytest.mark.registry

EDIT = {"content": f"It subtracts.\n\n{AIDER_EDIT}"}
WRONG = {"content": str(EDIT["content"]).replace("a - b", "a * b")}


async def test_it_solves_a_task_and_repairs_an_edit(stand: Stand) -> None:
    """An edit that does not apply is asked for again; the diff has nothing of its own files, and every
    sampled token is captured and trained."""
    run = await stand.run(Aider(), asked={"failed to match": EDIT, "surprising": WRONG})

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert run.diff.count(b"diff --git") == 1
    assert len(run.turns) == 2
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens
