"""How each agent is started and how its end is classified, without a sandbox."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import JsonValue

from perdure import variant_registry
from perdure.agents import prompt_template
from perdure.agents.base import HOME, Agent, AgentTask, Evidence
from perdure.agents.base_suite import BaseSuite
from perdure.agents.mini_swe_agent import CONFIG, TRAJECTORY, MiniSweAgent
from perdure.agents.nop import Nop
from perdure.agents.oracle import GOLD, Oracle
from perdure.errors import ConfigurationError, InstanceError
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.types import AgentEnd, Instance, Sampling, Source, SourceKind

INSTANCE = Instance(
    instance_id="click-1",
    dataset="tests",
    problem_statement='Fix {workdir} \N{BUG}\u2028\x7f: it\'s "broken"',
    source=Source(kind=SourceKind.DIRECTORY),
    gold_patch=b"diff --git a/x b/x\r\n\xff",
)
TASK = AgentTask(
    instance=INSTANCE,
    workdir="/testbed",
    gateway_url="http://127.0.0.1:8080",
    session_key="session.secret",
    model="policy",
    sampling=Sampling(),
    budget_s=60.0,
)
NOWHERE = Source(kind=SourceKind.EMPTY)
EXITED = ExecStatus(ExecState.EXITED, code=0)


def evidence(
    status: ExecStatus = EXITED, exit_status: object = "Submitted", turns: int = 3
) -> Evidence:
    trajectory = json.dumps({"info": {"exit_status": exit_status}}).encode()
    return Evidence(status, b"", b"", {TRAJECTORY: trajectory}, turns)


@pytest.mark.parametrize("name", sorted(variant_registry.AGENTS))
def test_every_registered_agent_can_be_made(name: str) -> None:
    """Each name in the registry gives an agent with that name."""
    agent: Agent = variant_registry.load("agent", variant_registry.AGENTS, name)()

    assert agent.name == name


@pytest.mark.parametrize("agent", [Oracle(), Nop(), MiniSweAgent()], ids=lambda agent: agent.name)
def test_unknown_option_is_refused_by_name(agent: Agent) -> None:
    """The error for an unknown option names the option and the agent."""
    with pytest.raises(ConfigurationError, match=rf"agent_options.stpe_limit.*{agent.name}"):
        agent.launch(replace(TASK, options={"stpe_limit": 3}))


def test_wrong_option_says_what_is_wrong() -> None:
    """The error for an invalid value of a known option names the reason."""
    with pytest.raises(ConfigurationError, match=r"agent_options.step_limit: .*greater"):
        MiniSweAgent().launch(replace(TASK, options={"step_limit": -1}))


def test_oracle_carries_the_gold_patch_unchanged() -> None:
    """The gold patch reaches the sandbox byte for byte, outside the repository."""
    launch = Oracle().launch(TASK)

    assert launch.files == {GOLD: INSTANCE.gold_patch}
    assert launch.argv[-1] == GOLD
    assert GOLD.startswith(HOME)


def test_oracle_needs_a_gold_patch() -> None:
    """An instance without a gold patch is refused before a sandbox boots."""
    bare = INSTANCE.model_copy(update={"gold_patch": b""})

    with pytest.raises(InstanceError, match="gold_patch"):
        Oracle().launch(replace(TASK, instance=bare))


def test_base_suite_needs_a_row_that_a_suite_grades() -> None:
    """Without its hidden tests, a row with test lists would prove nothing."""
    with pytest.raises(
        InstanceError, match="tests/click-1: base_suite is for rows that the exit code"
    ):
        BaseSuite().launch(TASK)


@pytest.mark.parametrize("agent", [Oracle(), Nop()], ids=lambda agent: agent.name)
def test_agents_without_a_model_are_judged_by_their_exit(agent: Agent) -> None:
    """Exit code 0 is finished; any other is a crash, never a verdict on the patch."""
    failed = ExecStatus(ExecState.EXITED, code=1)

    assert agent.classify(evidence(turns=0)) is AgentEnd.FINISHED
    assert agent.classify(evidence(failed, turns=0)) is AgentEnd.CRASHED


def test_what_a_solution_did_within_its_time_is_graded() -> None:
    """As in Harbor."""
    late = ExecStatus(ExecState.KILLED, cause="timeout")

    assert Oracle().classify(evidence(late, turns=0)) is AgentEnd.LIMIT


def test_only_mini_swe_agent_sees_the_session_key_in_its_environment() -> None:
    """The key is only in the environment, because files and argv are stored as evidence, and its commands
    get an empty one."""
    launch = MiniSweAgent().launch(TASK)

    assert launch.env["OPENAI_API_KEY"] == TASK.session_key
    assert b'"env": {"OPENAI_API_KEY": ""}' in launch.files[CONFIG]
    assert TASK.session_key.encode() not in b"".join(launch.files.values())
    assert not any(TASK.session_key in argument for argument in launch.argv)


def test_mini_swe_agent_never_learns_the_solution() -> None:
    """Its launch contains neither the gold patch nor any part of the grading."""
    launch = MiniSweAgent().launch(TASK)

    assert not any(b"diff --git" in content for content in launch.files.values())


def test_mini_swe_agent_options_reach_its_command_line() -> None:
    """Step limit, prompt and extra flags are in its configuration and arguments."""
    options: dict[str, JsonValue] = {
        "step_limit": 7,
        "prompt_template": "Do it in {workdir}.",
        "extra_args": ["-l", "1"],
    }
    launch = MiniSweAgent().launch(replace(TASK, options=options))
    written = launch.files[CONFIG].decode()

    assert '"step_limit": 7' in written
    assert '"task": "Do it in /testbed."' in written
    assert launch.argv[-2:] == ("-l", "1")


def test_mini_swe_agent_needs_a_gateway() -> None:
    """Without a gateway the error says how to start one."""
    with pytest.raises(ConfigurationError, match="perdure up"):
        MiniSweAgent().launch(replace(TASK, gateway_url=None))


@pytest.mark.parametrize(
    ("exit_status", "end"),
    [
        ("Submitted", AgentEnd.FINISHED),
        ("LimitsExceeded", AgentEnd.LIMIT),
        ("TimeExceeded", AgentEnd.LIMIT),
        ("ContextWindowExceededError", AgentEnd.LIMIT),
        ("RepeatedFormatError", AgentEnd.GAVE_UP),
        ("APIConnectionError", AgentEnd.CRASHED),
        ("", AgentEnd.CRASHED),
        (["Submitted"], AgentEnd.CRASHED),
    ],
)
def test_mini_swe_agent_end_is_read_from_its_trajectory(exit_status: object, end: AgentEnd) -> None:
    """Its own exit status decides, not the exit code of its process."""
    assert MiniSweAgent().classify(evidence(exit_status=exit_status)) is end


@pytest.mark.parametrize("trajectory", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"info": 1}'])
def test_mini_swe_agent_hostile_trajectory_is_a_crash(trajectory: bytes) -> None:
    """A cut, foreign or hostile trajectory is a crash and never an exception."""
    kept = replace(evidence(), files={TRAJECTORY: trajectory})

    assert MiniSweAgent().classify(kept) is AgentEnd.CRASHED


def test_mini_swe_agent_without_a_model_call_never_ran() -> None:
    """If the gateway recorded no call, the trajectory's claims do not count."""
    assert MiniSweAgent().classify(evidence(turns=0)) is AgentEnd.NEVER_CALLED_MODEL


@pytest.mark.parametrize(("cause", "end"), [("timeout", AgentEnd.LIMIT), ("oom", AgentEnd.CRASHED)])
def test_mini_swe_agent_killed(cause: str, end: AgentEnd) -> None:
    """A kill by our time budget is a limit; any other kill is a crash."""
    status = ExecStatus(ExecState.KILLED, cause=cause, signal=9)  # type: ignore[arg-type]  # parametrized

    assert MiniSweAgent().classify(evidence(status, exit_status="")) is end


def test_prompt_is_filled_once() -> None:
    """Placeholders in the issue text stay text; unknown braces in the template stay too."""
    prompt = prompt_template.render("{x} {problem_statement} in {workdir} of {instance_id}", TASK)

    assert prompt == f"{{x}} {INSTANCE.problem_statement} in /testbed of click-1"


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({}, prompt_template.ISSUE_TEMPLATE.format(problem_statement="Do it.", workdir="/testbed")),
        ({"source": NOWHERE}, "Do it."),
        ({"source": NOWHERE, "problem_statement": "/app/x.py fails"}, "Task:\n/app/x.py fails"),
        ({"source": NOWHERE, "problem_statement": " !x"}, "Task:\n !x"),
        ({"prompt_template": "{problem_statement} In {workdir}."}, "Do it. In /testbed."),
    ],
    ids=["issue", "no repository", "a command", "a shell command", "the row's own"],
)
def test_a_task_decides_what_its_statement_is(changes: dict[str, Any], prompt: str) -> None:
    """Only an issue of a repository is called one. No agent takes a task for a command of its own. The
    request's template replaces all."""
    instance = INSTANCE.model_copy(update={"problem_statement": "Do it.", **changes})
    task = replace(TASK, instance=instance)

    assert prompt_template.render(None, task) == prompt
    assert (
        prompt_template.render("/x {problem_statement}", task) == f"/x {instance.problem_statement}"
    )
