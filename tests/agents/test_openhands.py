"""OpenHands' SDK from PyPI, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import itertools
from typing import Any

import pytest

from perdure.agents.openhands import Openhands
from perdure.errors import MissingDependency
from perdure.testing.agent_stand import FILE, Stand, call, script
from perdure.types import AgentEnd, Outcome

pytestmark = pytest.mark.registry


@pytest.fixture(autouse=True)
def python_of_its_own(stand: Stand) -> None:
    """It needs a newer Python than Perdure does."""
    try:
        Openhands().check_host(stand.agents)
    except MissingDependency as missing:
        pytest.skip(str(missing))


def bash(command: str) -> dict[str, Any]:
    return call("terminal", "Now.", command=command)


READ = call("file_editor", "First the file.", command="view", path=FILE)
EDIT = call(
    "file_editor",
    "It subtracts.",
    command="str_replace",
    path=FILE,
    old_str="a - b",
    new_str="a + b",
)
CHECK = bash("python3 -B -c 'import calc; print(calc.add(1, 2))'")
DONE = call("finish", message="add() adds now.")


async def test_it_solves_a_task_over_several_turns(stand: Stand) -> None:
    """It reads, edits and checks; the patch is graded resolved, every turn is captured exactly."""
    run = await stand.run(Openhands(), script(READ, EDIT, CHECK, DONE))

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert len(run.turns) == 4
    run.assert_token_exact()
    assert run.evidence.stderr_tail == b""


async def test_its_turns_are_one_growing_sequence(stand: Stand) -> None:
    """Each prompt begins with the prompt and answer before it, so all that was sampled is trained."""
    run = await stand.run(Openhands(), script(READ, EDIT, CHECK, DONE))

    for before, after in itertools.pairwise(run.turns):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held
    assert run.summary.bridge_misses == {"first": 1}
    assert run.trained() == run.summary.tokens


async def test_its_step_limit_is_a_limit(stand: Stand) -> None:
    """It stops after so many steps and says so; its work is kept."""
    run = await stand.run(Openhands(), script(EDIT, CHECK, CHECK, DONE), options={"max_steps": 2})

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_the_time_budget_is_a_limit(stand: Stand) -> None:
    """The time budget kills it, and its changes up to then are kept."""
    run = await stand.run_until_out_of_time(
        Openhands(), script(EDIT, bash("sleep 600"), bash("sleep 600"))
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_nothing_of_its_own_lands_in_the_diff(stand: Stand) -> None:
    """Its settings, logs and conversations stay outside the repository."""
    run = await stand.run(Openhands(), script(DONE))

    assert (run.end, run.diff) == (AgentEnd.FINISHED, b"")
