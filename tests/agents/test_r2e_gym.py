"""R2E-Gym's tool format, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import json
from typing import Any

import pytest

from perdure.agents.r2e_gym import R2eGym
from perdure.testing.agent_stand import FILE, Run, Stand, call, script
from perdure.types import AgentEnd, Outcome, Sampling

pytestmark = pytest.mark.registry

OLD, NEW = "return a - b", "return a + b"


def edit(command: str, path: str = FILE, **arguments: Any) -> dict[str, Any]:
    return call("file_editor", "Now.", command=command, path=path, **arguments)


def in_text(function: str, **parameters: str) -> dict[str, Any]:
    """The same call, as R2E-Gym's own models write it."""
    given = "".join(f"<parameter={name}>{one}</parameter>\n" for name, one in parameters.items())
    return {"content": f"Now.\n\n<function={function}>\n{given}</function>"}


FIX = edit("str_replace", old_str=OLD, new_str=NEW)
DONE = call("finish", command="submit")


def told(run: Run) -> list[str]:
    """What the model read after each of its turns but the last."""
    new = [json.loads(turn.new_messages) for turn in run.turns[1:]]
    return ["".join(message["content"] for message in messages) for messages in new]


def assert_solved(run: Run) -> None:
    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_it_solves_a_task_with_its_four_functions(stand: Stand) -> None:
    """The patch is graded resolved, each turn is captured exactly and trained, and no command inherits
    the session's key."""
    find, check = call("search", search_term=OLD), call("execute_bash", cmd="env; cat calc.py")
    run = await stand.run(R2eGym(), script(find, FIX, check, DONE))
    found, edited, checked = told(run)

    assert_solved(run)
    assert "calc.py (1 matches)" in found
    assert f"2\t    {NEW}" in edited
    assert "Exit code: 0" in checked
    assert NEW in checked
    assert "s-1." not in checked
    assert "Steps Remaining: 37" in checked


async def test_calls_as_text_work_too(stand: Stand) -> None:
    """The form of R2E-Gym's own models: no tools in the request, one call in each answer."""
    fix = in_text("file_editor", command="str_replace", path=FILE, old_str=OLD, new_str=NEW)
    look = in_text("file_editor", command="view", path=FILE, view_range="[2, -1]")
    run = await stand.run(
        R2eGym(),
        script(look, fix, in_text("finish", command="submit")),
        options={"use_fn_calling": False},
    )

    assert_solved(run)
    assert f"     2     {OLD}" in told(run)[0]
    assert "def add" not in told(run)[0]


async def test_an_edit_can_be_undone(stand: Stand) -> None:
    """`create`, `insert` and `undo_edit` do what they say, and a wrong call changes nothing."""
    new = f"{FILE.removesuffix('calc.py')}new.py"
    run = await stand.run(
        R2eGym(),
        script(
            edit("create", new, file_text="one = 1\n"),
            edit("insert", new, insert_line=1, new_str="two = 2"),
            edit("undo_edit", new),
            edit("str_replace", new, old_str="three", new_str="3"),
            edit("create", new, file_text="other"),
            FIX,
            DONE,
        ),
    )
    created, inserted, undone, absent, exists, _ = told(run)

    assert_solved(run)
    assert f"File created at {new}" in created
    assert "2\ttwo = 2" in inserted
    assert "undone successfully" in undone
    assert "No occurrences of 'three'" in absent
    assert "File already exists" in exists
    assert b"+one = 1\n" in run.diff
    assert b"two" not in run.diff


async def test_an_answer_without_a_call_is_asked_again(stand: Stand) -> None:
    """The published reminder, and what blocked commands and unknown functions get."""
    run = await stand.run(
        R2eGym(),
        script({"content": "Done."}, call("execute_bash", cmd="pip list"), call("bash"), FIX, DONE),
    )
    forgotten, blocked, unknown, _ = told(run)

    assert_solved(run)
    assert "You forgot to use a function call" in forgotten
    assert "'pip' is not allowed" in blocked
    assert "there is no such function" in unknown


async def test_its_step_limit_is_a_limit(stand: Stand) -> None:
    """The model is told to submit, then the agent stops; its work is kept."""
    options = {"max_steps": 1, "max_steps_absolute": 2}
    look = call("execute_bash", cmd="true")
    run = await stand.run(R2eGym(), script(FIX, look, look, DONE), options=options)

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said
    assert "You have reached the maximum number of steps" in told(run)[0]


async def test_a_full_context_is_a_limit(stand: Stand) -> None:
    """It does not compact, so a full context ends it; its work is kept."""
    long = call("execute_bash", cmd="printf '%09999d' 0; seq 5")
    run = await stand.run(
        R2eGym(),
        script(FIX, long, long, long, DONE),
        sampling=Sampling(max_context_tokens=9000, max_tokens_per_turn=500),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said
