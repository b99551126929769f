"""codex from npm, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import itertools
import json
from typing import Any

import pytest

from perdure.agents.codex import LAST_MESSAGE, Codex
from perdure.testing.agent_stand import Run, Stand, call, script
from perdure.types import AgentEnd, Outcome, Sampling

pytestmark = pytest.mark.registry

METADATA = "Model metadata for `policy` not found"
"""It says so of every name that its vendor does not sell; nothing depends on it."""


def bash(command: str, say: str = "Now.") -> dict[str, Any]:
    return call("exec_command", say, cmd=command)


READ = bash("cat calc.py")
EDIT = bash("sed -i 's/a - b/a + b/' calc.py", "It subtracts.")
CHECK = bash("python3 -B -c 'import calc; print(calc.add(1, 2))'")
DONE = {"content": "add() adds now."}


def trouble(run: Run) -> list[str]:
    """Every error and reconnect that it told of, but the one that always comes."""
    log = [json.loads(line) for line in run.evidence.stdout_tail.splitlines()]
    items = [event.get("item", event) for event in log]
    told = [str(item) for item in items if item.get("type") in ("error", "turn.failed")]
    return [
        text for text in told if METADATA not in text
    ] + run.evidence.stderr_tail.decode().splitlines()


async def test_it_solves_a_task_over_several_turns(stand: Stand) -> None:
    """It reads, edits and checks; the patch is graded resolved, every turn is captured exactly."""
    run = await stand.run(Codex(), script(READ, EDIT, CHECK, DONE))

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert len(run.turns) == 4
    assert run.evidence.files[LAST_MESSAGE] == b"add() adds now."
    run.assert_token_exact()
    assert trouble(run) == []


async def test_its_turns_are_one_growing_sequence(stand: Stand) -> None:
    """Each prompt begins with the prompt and answer before it, so all that was sampled is trained."""
    run = await stand.run(Codex(), script(READ, EDIT, CHECK, DONE))

    for before, after in itertools.pairwise(run.turns):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held
    assert run.trained() == run.summary.tokens


async def test_the_time_budget_is_a_limit(stand: Stand) -> None:
    """The time budget kills it, and its changes up to then are kept."""
    run = await stand.run_until_out_of_time(
        Codex(), script(EDIT, bash("sleep 600"), bash("sleep 600"))
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_a_full_context_is_a_limit(stand: Stand) -> None:
    """Where it does not compact in time, the refused prompt ends it as a limit."""
    noise = bash("head -c 9000 /dev/urandom | base64 -w 100")
    run = await stand.run(
        Codex(),
        script(noise, noise, noise, noise, noise, DONE),
        options={"context_window": 96_000},
        sampling=Sampling(max_context_tokens=24_000, max_tokens_per_turn=1000),
    )

    assert run.end is AgentEnd.LIMIT, run.said
    run.assert_token_exact()


async def test_after_a_compaction_the_work_continues(stand: Stand) -> None:
    """With a small window it summarises its history, continues from there, and finishes the
    task."""
    noise = bash("head -c 6000 /dev/urandom | base64 -w 100")
    run = await stand.run(
        Codex(),
        script(EDIT, DONE, match="SOFARNOTHING"),
        script(noise, noise, noise, noise, noise, DONE),
        asked={"CONTEXT CHECKPOINT": {"content": "SOFARNOTHING: calc.py is to be fixed."}},
        options={"context_window": 24_000},
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_a_bad_flag_never_called_the_model(stand: Stand) -> None:
    """A launch fault has an end of its own, which no policy can cause."""
    run = await stand.run(Codex(), script(DONE), options={"extra_args": ["--no-such-flag"]})

    assert run.end is AgentEnd.NEVER_CALLED_MODEL


async def test_its_commands_do_not_see_the_key(stand: Stand) -> None:
    """What its shell prints is kept; the session key is not in it."""
    run = await stand.run(Codex(), script(bash("env"), DONE))

    assert b"PATH=" in run.evidence.stdout_tail
    assert b"PERDURE_SESSION_KEY" not in run.evidence.stdout_tail


async def test_nothing_of_its_own_lands_in_the_diff(stand: Stand) -> None:
    """Its settings, logs and caches stay outside the repository."""
    run = await stand.run(Codex(), script(DONE))

    assert (run.end, run.diff) == (AgentEnd.FINISHED, b"")
