"""smolagents from PyPI, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import pytest

from perdure.agents.smolagents import Smolagents
from perdure.testing.agent_stand import Stand, script
from perdure.types import AgentEnd, Outcome, Sampling

pytestmark = pytest.mark.registry


def python(code: str) -> dict[str, str]:
    return {"content": f"Now.\n<code>\n{code}\n</code>"}


EDIT = python("print(bash(\"sed -i 's/a - b/a + b/' calc.py\"))")
CHECK = python("import os\nprint(bash('env'), os.listdir('.'))")
DONE = python("final_answer('add() adds now.')")


async def test_it_solves_a_task_with_its_shell_and_python(stand: Stand) -> None:
    """The patch is graded resolved, each turn is captured exactly and trained, and no command inherits
    the session's key."""
    run = await stand.run(Smolagents(), script(EDIT, CHECK, DONE))

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert run.diff.count(b"diff --git") == 1
    assert len(run.turns) == 3
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens
    assert "s-1." not in run.turns[2].new_messages


async def test_its_step_limit_is_a_limit(stand: Stand) -> None:
    """It stops after so many steps; its work is kept."""
    run = await stand.run(Smolagents(), script(EDIT, CHECK, DONE), options={"max_steps": 1})

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_a_full_context_is_a_limit(stand: Stand) -> None:
    """It does not compact, so the gateway's refusal of a longer prompt ends it; its work is kept."""
    look = python("print(bash('seq 2000'))")
    run = await stand.run(
        Smolagents(),
        script(EDIT, look, look, DONE),
        sampling=Sampling(max_context_tokens=9000, max_tokens_per_turn=500),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said
