"""Gemini CLI from npm, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import itertools
from typing import Any

import pytest

from perdure.agents.gemini_cli import GeminiCli
from perdure.testing.agent_stand import FILE, Stand, call, script
from perdure.types import AgentEnd, Outcome, Sampling

pytestmark = pytest.mark.registry


def bash(command: str) -> dict[str, Any]:
    return call("run_shell_command", "Now.", command=command)


READ = call("read_file", "First the file.", file_path=FILE)
EDIT = call(
    "replace",
    "It subtracts.",
    file_path=FILE,
    instruction="Add instead of subtracting.",
    old_string="a - b",
    new_string="a + b",
)
CHECK = bash("python3 -B -c 'import calc; print(calc.add(1, 2))'")
NOISE = bash("head -c 9000 /dev/urandom | base64 -w 100")
DONE = {"content": "add() adds now."}


async def test_it_solves_a_task_over_several_turns(stand: Stand) -> None:
    """It reads, edits and checks; the patch is graded resolved, every turn is captured exactly, and
    each prompt extends the turn before it, so all that was sampled is trained."""
    thinks = {**READ, "reasoning": "Where is add()?"}
    run = await stand.run(GeminiCli(), script(thinks, EDIT, CHECK, DONE))

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert len(run.turns) == 4
    run.assert_token_exact()
    for before, after in itertools.pairwise(run.turns):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held
    assert run.summary.bridge_misses == {"first": 1}
    assert run.trained() == run.summary.tokens


async def test_a_sub_agent_is_captured_and_trained(stand: Stand) -> None:
    """It is a chain of its own, and its last answer, a call that nothing follows, is trained too."""
    ask = {"agent_name": "generalist", "prompt": "ASKED: which line?"}
    told = call("complete_task", result={"response": "Line 2 subtracts."})
    run = await stand.run(
        GeminiCli(),
        script(READ, told, match="ASKED: which line?"),
        script(call("invoke_agent", "Ask.", **ask), READ, EDIT, DONE),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert [turn.bridged for turn in run.turns] == [False, False, True, True, True, True]
    assert [turn.chain == "main" for turn in run.turns] == [True, False, False, True, True, True]
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_a_full_context_is_a_limit(stand: Stand) -> None:
    """It stops when the gateway refuses a prompt; its work is kept."""
    run = await stand.run(
        GeminiCli(),
        script(READ, EDIT, *[NOISE] * 12, DONE),
        sampling=Sampling(max_context_tokens=40_000, max_tokens_per_turn=2000),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said
    run.assert_token_exact()


async def test_its_turn_limit_is_a_limit(stand: Stand) -> None:
    """It stops after so many calls and says so by its exit code; its work is kept."""
    run = await stand.run(GeminiCli(), script(READ, EDIT, CHECK, DONE), options={"max_turns": 2})

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_a_bad_flag_never_called_the_model(stand: Stand) -> None:
    """A launch fault has an end of its own, which no policy can cause."""
    run = await stand.run(GeminiCli(), script(DONE), options={"extra_args": ["--no-such-flag"]})

    assert run.end is AgentEnd.NEVER_CALLED_MODEL


async def test_nothing_of_its_own_lands_in_the_diff(stand: Stand) -> None:
    """Its settings, logs and caches stay outside the repository."""
    run = await stand.run(GeminiCli(), script(DONE))

    assert (run.end, run.diff) == (AgentEnd.FINISHED, b"")
