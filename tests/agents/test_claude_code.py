"""Claude Code from npm, in a bubblewrap sandbox, against the real gateway and a scripted policy."""

import itertools
import json
from typing import Any

import pytest

from perdure.agents.claude_code import ClaudeCode
from perdure.testing.agent_stand import FILE, Run, Stand, call, script
from perdure.types import AgentEnd, Outcome, Purpose, Sampling

pytestmark = pytest.mark.registry

READ = call("Read", "First the file.", file_path=FILE)
EDIT = call("Edit", "It subtracts.", file_path=FILE, old_string="a - b", new_string="a + b")
CHECK = call("Bash", "Does it add?", command="python3 -B -c 'import calc; print(calc.add(1, 2))'")
DONE = {"content": "add() adds now."}
SUMMARY = "CRITICAL: Respond with TEXT ONLY"
"""How its own request for a summary begins."""
HELPER = {"description": "Reads code", "prompt": "You investigate.", "tools": ["Grep", "Read"]}


def noise(size: int) -> dict[str, Any]:
    """A tool call whose output does not compress: about 0.75 tokens a byte."""
    return call("Bash", "More.", command=f"head -c {size} /dev/urandom | base64 -w 100")


def trouble(run: Run) -> list[str]:
    """Its messages about retries, fallbacks and warnings, on either output."""
    words = ("api_retry", "fallback", "warn", "deprecat", "error")
    log = [json.loads(line) for line in run.evidence.stdout_tail.splitlines()]
    told = [event["subtype"] for event in log if event.get("type") == "system"]
    said = run.evidence.stderr_tail.decode().splitlines()
    return [text for text in told + said if any(word in text.lower() for word in words)]


async def test_it_solves_a_task_over_several_turns(stand: Stand) -> None:
    """It reads, edits and checks; the patch is graded resolved, every turn is captured exactly."""
    run = await stand.run(ClaudeCode(), script(READ, EDIT, CHECK, DONE))

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert len(run.turns) == 4
    run.assert_token_exact()
    assert trouble(run) == []


async def test_its_turns_are_one_growing_sequence(stand: Stand) -> None:
    """Each prompt begins with the prompt and answer before it, so all that was sampled is trained."""
    run = await stand.run(ClaudeCode(), script(READ, EDIT, CHECK, DONE))

    for before, after in itertools.pairwise(run.turns):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held
    assert run.trained() == run.summary.tokens


async def test_samples_of_an_instance_have_the_same_prompts(stand: Stand) -> None:
    """Its prompts hold nothing of one run, so siblings share a cache and a lost run can be
    replayed."""
    one = await stand.run(ClaudeCode(), script(READ, EDIT, CHECK, DONE))
    other = await stand.run(ClaudeCode(), script(READ, EDIT, CHECK, DONE))

    assert [t.prompt_ids for t in one.turns] == [t.prompt_ids for t in other.turns]


async def test_a_sub_agent_is_a_chain_of_its_own(stand: Stand) -> None:
    """A registered sub-agent answers in its own chain; both chains are captured and trained."""
    task = {"description": "Look", "prompt": "HELPERTASK: which line?", "subagent_type": "helper"}
    run = await stand.run(
        ClaudeCode(),
        script(
            call("Grep", pattern="return", path="/testbed", output_mode="content"),
            {"content": "Line 2 subtracts."},
            match="HELPERTASK",
        ),
        script(call("Agent", "Ask.", **task), EDIT, DONE),
        options={"agents": {"helper": HELPER}},
    )
    helper = next(turn.chain for turn in run.turns if turn.chain != "main")

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert [len(run.steps(chain)) for chain in ("main", helper)] == [3, 2]
    assert {turn.parent_chain for turn in run.steps(helper)} == {"main"}
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_parallel_sub_agents_do_not_mix(stand: Stand) -> None:
    """Two sub-agents at once are two chains, each answered by its own script."""

    def ask(word: str) -> dict[str, Any]:
        arguments = {"description": word, "prompt": f"{word}: look.", "subagent_type": "helper"}
        return {"name": "Agent", "arguments": arguments}

    run = await stand.run(
        ClaudeCode(),
        script(call("Read", file_path=FILE), {"content": "One."}, match="FIRSTTASK"),
        script(call("Read", file_path=FILE), {"content": "Two."}, match="SECONDTASK"),
        script({"content": "", "tool_calls": [ask("FIRSTTASK"), ask("SECONDTASK")]}, EDIT, DONE),
        options={"agents": {"helper": HELPER}},
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert run.summary.chains == 3
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_a_compaction_is_a_branch_and_the_work_continues(stand: Stand) -> None:
    """With a small window it summarises, continues from the summary, and finishes the task."""
    run = await stand.run(
        ClaudeCode(),
        script(READ, EDIT, DONE, match="SOFARNOTHING"),
        script(noise(15_000), noise(15_000), DONE),
        asked={SUMMARY: {"content": "<summary>SOFARNOTHING: calc.py is to be fixed.</summary>"}},
        options={"context_window": 40_000, "max_output_tokens": 4096},
    )
    purposes = [turn.purpose for turn in run.turns]

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert purposes.count(Purpose.COMPACTION) == 1
    assert b'"compact_boundary"' in run.evidence.stdout_tail
    run.assert_token_exact()
    assert run.trained() == run.summary.tokens


async def test_a_full_context_is_compacted_and_not_fatal(stand: Stand) -> None:
    """Our refusal of a prompt over the budget is understood: it compacts and finishes."""
    run = await stand.run(
        ClaudeCode(),
        script(READ, EDIT, DONE, match="SOFARNOTHING"),
        script(noise(15_000), noise(15_000), DONE),
        asked={SUMMARY: {"content": "<summary>SOFARNOTHING: calc.py is to be fixed.</summary>"}},
        options={"context_window": 96_000},
        sampling=Sampling(max_context_tokens=30_000, max_tokens_per_turn=1000),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    run.assert_token_exact()


async def test_a_context_that_no_compaction_saves_is_a_limit(stand: Stand) -> None:
    """If even the summary does not fit, it ends at once, and its work up to then is graded."""
    run = await stand.run(
        ClaudeCode(),
        script(EDIT, noise(6000), DONE),
        options={"context_window": 96_000},
        sampling=Sampling(max_context_tokens=6500, max_tokens_per_turn=500),
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said
    run.assert_token_exact()


async def test_max_turns_is_a_limit(stand: Stand) -> None:
    """It stops after the allowed number of model calls; its work up to then is graded."""
    run = await stand.run(ClaudeCode(), script(READ, EDIT, CHECK, DONE), options={"max_turns": 2})

    assert (run.end, len(run.turns)) == (AgentEnd.LIMIT, 2), run.said
    assert run.grade.outcome is Outcome.RESOLVED


async def test_the_time_budget_is_a_limit(stand: Stand) -> None:
    """The time budget kills it, and its changes up to then are kept."""
    run = await stand.run_until_out_of_time(
        ClaudeCode(), script(EDIT, call("Bash", command="sleep 600"), DONE)
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said
    run.assert_token_exact()


async def test_answers_that_never_end_are_a_limit(stand: Stand) -> None:
    """A policy that always runs into the cap of a turn ends the run by a limit, not by a crash."""
    run = await stand.run(
        ClaudeCode(), script({"content": "word " * 500}), sampling=Sampling(max_tokens_per_turn=100)
    )

    assert run.end is AgentEnd.LIMIT, run.said
    run.assert_token_exact()


async def test_a_bad_flag_never_called_the_model(stand: Stand) -> None:
    """A launch fault has an end of its own, which no policy can cause."""
    run = await stand.run(ClaudeCode(), script(DONE), options={"extra_args": "--no-such-flag"})

    assert run.end is AgentEnd.NEVER_CALLED_MODEL
    assert run.turns == []


async def test_nothing_of_its_own_lands_in_the_diff(stand: Stand) -> None:
    """Its settings, logs and caches stay outside the repository."""
    run = await stand.run(ClaudeCode(), script(DONE))

    assert (run.end, run.diff) == (AgentEnd.FINISHED, b"")


async def test_a_prompt_longer_than_an_argument_arrives(stand: Stand) -> None:
    """An issue of 200 kB reaches the policy to its last word."""
    template = "{problem_statement}\n" + "line of a long log\n" * 11_000 + "LASTWORD"
    run = await stand.run(
        ClaudeCode(), script(DONE, match="LASTWORD"), options={"prompt_template": template}
    )

    assert (run.end, run.summary.tokens) == (AgentEnd.FINISHED, run.trained()), run.said
    assert b"add() adds now." in run.evidence.stdout_tail
