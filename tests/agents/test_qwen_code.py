"""Qwen Code from npm, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from perdure.agents.qwen_code import QwenCode
from perdure.testing.agent_stand import FILE, Run, Stand, call, script
from perdure.types import AgentEnd, Outcome, Purpose

pytestmark = pytest.mark.registry

OPENING = {"content": "Got it."}
"""Its history opens with an answer that no model gave; scripts count it as their first."""


def bash(command: str) -> dict[str, Any]:
    return call("run_shell_command", "Now.", command=command, is_background=False)


READ = call("read_file", "First the file.", file_path=FILE)
EDIT = call("edit", "It subtracts.", file_path=FILE, old_string="a - b", new_string="a + b")
CHECK = bash("python3 -B -c 'import calc; print(calc.add(1, 2))'")
NOISE = bash("head -c 9000 /dev/urandom | base64 -w 100")
DONE = {"content": "add() adds now."}


def of(*scripted: dict[str, Any], match: str = "calc.py") -> Mapping[str, Any]:
    """Its opening lists the files of the repository; the issue comes after the first answer."""
    return script(OPENING, *scripted, match=match)


def trouble(run: Run) -> list[str]:
    """Every error that it told of, on either output."""
    log = [json.loads(line) for line in run.evidence.stdout_tail.splitlines()]
    told = [str(event) for event in log if event.get("is_error") or "API Error" in str(event)]
    return told + run.evidence.stderr_tail.decode().splitlines()


async def test_it_solves_a_task_over_several_turns(stand: Stand) -> None:
    """It reads, edits and checks; the patch is graded resolved, every turn is captured exactly."""
    run = await stand.run(QwenCode(), of(READ, EDIT, CHECK, DONE))

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert len(run.turns) == 4
    run.assert_token_exact()
    assert trouble(run) == []


async def test_its_turns_are_one_growing_sequence(stand: Stand) -> None:
    """Each prompt begins with the prompt and answer before it, so all that was sampled is trained."""
    run = await stand.run(QwenCode(), of(READ, EDIT, CHECK, DONE))

    for before, after in itertools.pairwise(run.turns):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held
    assert run.summary.bridge_misses == {"first": 1}
    assert run.trained() == run.summary.tokens


async def test_a_sub_agent_is_captured_and_trained(stand: Stand) -> None:
    """Its requests carry no name of their own; its turns still extend one another, and main's too."""
    ask = {"description": "Look", "prompt": "Which line?", "subagent_type": "general-purpose"}
    run = await stand.run(
        QwenCode(),
        of(READ, {"content": "Line 2 subtracts."}, match="You are a general-purpose agent"),
        of(call("agent", "Ask.", **ask), READ, EDIT, DONE),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert [turn.bridged for turn in run.turns] == [False, False, True, True, True, True]
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_after_a_compaction_the_work_continues(stand: Stand) -> None:
    """With a small window it summarises its history, continues from there, and finishes the
    task."""
    run = await stand.run(
        QwenCode(),
        of(READ, EDIT, DONE, match="SOFARNOTHING"),
        of(NOISE, NOISE, NOISE, NOISE, DONE),
        asked={
            "scratchpad": {
                "content": "<state_snapshot>SOFARNOTHING: calc.py is to be fixed.</state_snapshot>"
            }
        },
        options={"context_window": 32_000, "max_output_tokens": 2000},
    )

    assert Purpose.COMPACTION in [turn.purpose for turn in run.turns]
    assert run.end is AgentEnd.FINISHED, run.said
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_its_turn_limit_is_a_limit(stand: Stand) -> None:
    """It stops after so many calls and says so by its exit code; its work is kept."""
    run = await stand.run(QwenCode(), of(READ, EDIT, CHECK, DONE), options={"max_turns": 2})

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_the_time_budget_is_a_limit(stand: Stand) -> None:
    """The time budget kills it, and its changes up to then are kept."""
    run = await stand.run_until_out_of_time(
        QwenCode(), of(READ, EDIT, bash("sleep 600"), bash("sleep 600"))
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_a_bad_flag_never_called_the_model(stand: Stand) -> None:
    """A launch fault has an end of its own, which no policy can cause."""
    run = await stand.run(QwenCode(), of(DONE), options={"extra_args": ["--no-such-flag"]})

    assert run.end is AgentEnd.NEVER_CALLED_MODEL


async def test_a_long_issue_arrives_whole(stand: Stand) -> None:
    """Above 128 KiB no argument could carry it."""
    template = "{problem_statement}\n" + "line of a long log\n" * 11_000 + "LASTWORD"
    run = await stand.run(
        QwenCode(), of(DONE), asked={"LASTWORD": DONE}, options={"prompt_template": template}
    )

    assert (run.end, run.summary.tokens) == (AgentEnd.FINISHED, run.trained()), run.said
    assert b"add() adds now." in run.evidence.stdout_tail


async def test_nothing_of_its_own_lands_in_the_diff(stand: Stand) -> None:
    """Its settings, logs and caches stay outside the repository."""
    run = await stand.run(QwenCode(), of(DONE))

    assert (run.end, run.diff) == (AgentEnd.FINISHED, b"")
