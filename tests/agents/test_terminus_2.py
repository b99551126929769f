"""Terminus 2 from PyPI, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import itertools
import json
from typing import Any

import pytest

from perdure.agents.terminus_2 import TRAJECTORY, Terminus2
from perdure.errors import MissingDependency
from perdure.testing.agent_stand import Stand, script
from perdure.types import AgentEnd, Outcome

pytestmark = pytest.mark.registry


@pytest.fixture(autouse=True)
def host_with_tmux_and_python(stand: Stand) -> None:
    try:
        Terminus2().check_host(stand.agents)
    except MissingDependency as missing:
        pytest.skip(str(missing))


def typed(*lines: str, done: bool = False) -> dict[str, Any]:
    """A turn that types lines into the terminal, each with enough time to end."""
    commands = [{"keystrokes": f"{line}\n", "duration": 2.0} for line in lines]
    turn = {"analysis": "It subtracts.", "plan": "Now.", "commands": commands}
    return {"content": json.dumps({**turn, "task_complete": done})}


EDIT = typed("sed -i 's/a - b/a + b/' calc.py")
CHECK = typed("env", "python3 -B -c 'import calc; print(calc.add(20, 22))'")
DONE = typed(done=True)


async def test_it_solves_a_task_in_its_terminal(stand: Stand) -> None:
    """The patch is graded resolved, each turn is captured exactly and trained, and the terminal inherits
    neither the session's key nor the agent's PATH."""
    run = await stand.run(Terminus2(), script(EDIT, CHECK, DONE, DONE))
    seen = run.turns[2].new_messages

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert run.diff.count(b"diff --git") == 1
    assert len(run.turns) == 4
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens
    assert "\\n42\\n" in seen
    assert "s-1." not in seen
    assert "/opt/tmux" not in seen
    assert b"s-1." not in run.evidence.files[TRAJECTORY]


async def test_its_turns_are_one_growing_sequence(stand: Stand) -> None:
    """Each prompt begins with the prompt and answer before it, so all that was sampled is trained."""
    run = await stand.run(Terminus2(), script(EDIT, DONE, DONE))

    for before, after in itertools.pairwise(run.turns):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held


async def test_its_model_may_answer_in_xml(stand: Stand) -> None:
    """The option changes what its prompt asks for, and what it reads."""
    keys = "<keystrokes duration=\"2.0\">sed -i 's/a - b/a + b/' calc.py\n</keystrokes>"
    edit = (
        f"<response><analysis>It subtracts.</analysis><plan>Now.</plan><commands>{keys}</commands>"
    )
    done = "<task_complete>true</task_complete></response>"
    turns = ({"content": f"{edit}{done}"}, {"content": f"{edit}{done}"})
    run = await stand.run(Terminus2(), script(*turns), options={"parser": "xml"})

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    run.assert_token_exact()


@pytest.mark.parametrize(
    ("second", "options", "end"),
    [(CHECK, {"max_turns": 2}, AgentEnd.LIMIT), (typed("exit"), {}, AgentEnd.GAVE_UP)],
    ids=["max_turns", "exit"],
)
async def test_an_unconfirmed_end_keeps_its_work(
    stand: Stand, second: dict[str, Any], options: dict[str, int], end: AgentEnd
) -> None:
    """It stops after so many turns, and when the model leaves the shell."""
    run = await stand.run(Terminus2(), script(EDIT, second, DONE), options=options)

    assert (run.end, run.grade.outcome) == (end, Outcome.RESOLVED), run.said
