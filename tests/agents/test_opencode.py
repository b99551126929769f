"""opencode from npm, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from perdure.agents.base import AgentTask, Launch
from perdure.agents.opencode import TITLE, Opencode
from perdure.testing.agent_stand import FILE, Run, Stand, call, script
from perdure.types import AgentEnd, Outcome, Purpose, Sampling

pytestmark = pytest.mark.registry

READ = call("read", "First the file.", filePath=FILE)
EDIT = call("edit", "It subtracts.", filePath=FILE, oldString="a - b", newString="a + b")
DONE = {"content": "add() adds now."}
SUMMARISE = "Do not mention the summary process"
"""How its own request for a summary ends."""


def bash(command: str) -> dict[str, Any]:
    return call("bash", "Now.", command=command, description="a command")


CHECK = bash("python3 -B -c 'import calc; print(calc.add(1, 2))'")
NOISE = bash("head -c 6000 /dev/urandom | base64 -w 100")


def trouble(run: Run) -> list[str]:
    """Every error it told of, on either output."""
    log = [json.loads(line) for line in run.evidence.stdout_tail.splitlines()]
    told = [str(event) for event in log if event["type"] == "error"]
    return told + run.evidence.stderr_tail.decode().splitlines()


async def test_it_solves_a_task_over_several_turns(stand: Stand) -> None:
    """It reads, edits and checks; the patch is graded resolved, every turn is captured exactly."""
    run = await stand.run(Opencode(), script(READ, EDIT, CHECK, DONE))

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert len(run.turns) == 4
    run.assert_token_exact()
    assert trouble(run) == []


async def test_its_turns_are_one_growing_sequence(stand: Stand) -> None:
    """Each prompt begins with the prompt and answer before it, so all that was sampled is trained."""
    run = await stand.run(Opencode(), script(READ, EDIT, CHECK, DONE))

    for before, after in itertools.pairwise(run.turns):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held
    assert run.summary.bridge_misses == {"first": 1}
    assert run.trained() == run.summary.tokens


async def test_parallel_sub_agents_are_chains_of_their_own(stand: Stand) -> None:
    """Two sub-agents at once are two chains below main, captured and trained."""

    def ask(word: str) -> dict[str, Any]:
        arguments = {"description": word, "prompt": f"{word}: look.", "subagent_type": "general"}
        return {"name": "task", "arguments": arguments}

    run = await stand.run(
        Opencode(),
        script(READ, {"content": "One."}, match="FIRSTTASK"),
        script(READ, {"content": "Two."}, match="SECONDTASK"),
        script({"content": "", "tool_calls": [ask("FIRSTTASK"), ask("SECONDTASK")]}, EDIT, DONE),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert run.summary.bridge_misses == {"first": 3}
    assert {turn.parent_chain for turn in run.turns} == {"", "main"}
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_a_compaction_is_a_branch_and_the_work_continues(stand: Stand) -> None:
    """With a small window it summarises, continues from the summary, and finishes the task."""
    run = await stand.run(
        Opencode(),
        script(EDIT, DONE, match="SOFARNOTHING"),
        script(NOISE, NOISE, NOISE, NOISE, EDIT, DONE),
        asked={SUMMARISE: {"content": "SOFARNOTHING: calc.py is to be fixed."}},
        options={"context_window": 24_000, "max_output_tokens": 2000},
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert Purpose.COMPACTION in [turn.purpose for turn in run.turns]
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_a_tool_call_for_a_summary_gives_up(stand: Stand) -> None:
    """A policy that cannot summarise failed by itself: it is graded, not tried again."""
    run = await stand.run(
        Opencode(),
        script(EDIT, NOISE, NOISE, NOISE, NOISE, DONE),
        asked={SUMMARISE: NOISE},
        options={"context_window": 24_000, "max_output_tokens": 2000},
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.GAVE_UP, Outcome.RESOLVED), run.said


class Titled(Opencode):
    """As a user starts it, without a title."""

    def launch(self, task: AgentTask) -> Launch:
        launch = super().launch(task)
        return replace(launch, argv=tuple(a for a in launch.argv if a not in ("--title", TITLE)))


async def test_a_title_is_recorded_and_never_trained(stand: Stand) -> None:
    """The request for a title, which it makes when none is given, is no step of the agent."""
    run = await stand.run(
        Titled(), script(EDIT, DONE), asked={"Generate a title": {"content": "Fix add()"}}
    )
    side = [turn for turn in run.turns if turn.purpose is Purpose.SIDE]

    assert (run.end, run.grade.outcome, len(side)) == (AgentEnd.FINISHED, Outcome.RESOLVED, 1)
    assert run.trained() == sum(len(turn.completion_ids) for turn in run.steps())
    run.assert_token_exact()


async def test_its_step_limit_is_a_limit(stand: Stand) -> None:
    """The last step that it may take is told to close, and the end says that it was cut short."""
    run = await stand.run(Opencode(), script(EDIT, DONE), options={"max_steps": 2})

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_the_time_budget_is_a_limit(stand: Stand) -> None:
    """The time budget kills it, and its changes up to then are kept."""
    run = await stand.run_until_out_of_time(
        Opencode(), script(EDIT, bash("sleep 600"), bash("sleep 600"))
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said


async def test_a_full_context_does_not_end_as_a_fault(stand: Stand) -> None:
    """A prompt that the gateway refuses is summarised, or ends the agent as a limit."""
    run = await stand.run(
        Opencode(),
        script(NOISE, NOISE, NOISE, NOISE, NOISE, DONE),
        options={"context_window": 96_000},
        sampling=Sampling(max_context_tokens=24_000, max_tokens_per_turn=1000),
    )

    assert run.end in (AgentEnd.LIMIT, AgentEnd.GAVE_UP), run.said
    run.assert_token_exact()


async def test_a_bad_flag_never_called_the_model(stand: Stand) -> None:
    """A launch fault has an end of its own, which no policy can cause."""
    run = await stand.run(Opencode(), script(DONE), options={"extra_args": ["--no-such-flag"]})

    assert run.end is AgentEnd.NEVER_CALLED_MODEL


async def test_a_long_issue_arrives_whole(stand: Stand) -> None:
    """Above 128 KiB no argument could carry it."""
    template = "{problem_statement}\n" + "line of a long log\n" * 11_000 + "LASTWORD"
    run = await stand.run(
        Opencode(), script(DONE, match="LASTWORD"), options={"prompt_template": template}
    )

    assert (run.end, run.summary.tokens) == (AgentEnd.FINISHED, run.trained()), run.said


async def test_nothing_of_its_own_lands_in_the_diff(stand: Stand) -> None:
    """Its settings, logs and databases stay outside the repository."""
    run = await stand.run(Opencode(), script(DONE))

    assert (run.end, run.diff) == (AgentEnd.FINISHED, b"")
