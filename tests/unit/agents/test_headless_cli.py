"""Shared by headless agents: options under two names, the prompt on stdin, refused variables."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.agents import headless_cli
from perdure.agents.base import Agent, Evidence
from perdure.agents.claude_code import ClaudeCode
from perdure.agents.codex import Codex
from perdure.agents.gemini_cli import GeminiCli
from perdure.agents.opencode import Opencode
from perdure.agents.openhands import Openhands
from perdure.agents.qwen_code import QwenCode
from perdure.agents.r2e_gym import R2eGym
from perdure.agents.smolagents import Smolagents
from perdure.agents.terminus_2 import Terminus2
from perdure.errors import ConfigurationError
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options

WITH_FLAGS = [ClaudeCode(), Codex(), Opencode(), QwenCode(), GeminiCli()]
AGENTS = [*WITH_FLAGS, Openhands(), R2eGym(), Smolagents(), Terminus2()]
every_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)


@every_agent
def test_the_key_is_not_kept(agent: Agent) -> None:
    """Arguments are visible to all processes, and artifacts are kept as evidence, so the session key is
    in neither."""
    launch = agent.launch(TASK)
    kept = [content for path, content in launch.files.items() if path in agent.artifacts]
    given = b"".join([*launch.files.values(), *(value.encode() for value in launch.env.values())])

    assert TASK.session_key.encode() in given
    assert not any(TASK.session_key in argument for argument in launch.argv)
    assert TASK.session_key.encode() not in b"".join(kept)


@every_agent
def test_the_gateway_can_tell_its_calls(agent: Agent) -> None:
    """It is told the header that its calls carry, which is another one for each session."""
    (mark,), (other,) = (
        replace(TASK, session_key=key).headers.values() for key in (TASK.session_key, "else")
    )
    launch = agent.launch(TASK)

    assert mark != other
    assert mark.encode() in b"".join(
        [*launch.files.values(), *(value.encode() for value in launch.env.values())]
    )


@every_agent
def test_the_solution_stays_outside(agent: Agent) -> None:
    """The launch does not contain the gold patch."""
    launch = agent.launch(TASK)

    assert not any(b"diff --git" in content for content in launch.files.values())


@every_agent
def test_the_prompt_is_read_from_its_file(agent: Agent, tmp_path: Path) -> None:
    """The command gets the prompt on standard input and its own flags unchanged."""
    launch = agent.launch(with_options(prompt_template="Do {problem_statement} in {workdir}."))
    copy = tmp_path / "prompt.txt"
    copy.write_bytes(launch.files[headless_cli.PROMPT])
    shell, option, line, *_ = headless_cli.with_prompt(("/bin/cat", "-"))
    argv = (shell, option, line.replace(headless_cli.PROMPT, str(copy)), "sh", "/bin/cat", "-")

    async def printed() -> bytes:
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0]

    assert asyncio.run(printed()) == b"Do add() subtracts in /testbed."


@pytest.mark.parametrize("agent", WITH_FLAGS, ids=lambda agent: agent.name)
def test_options_under_the_documents_names(agent: Agent) -> None:
    """SWE_CC_PROMPT and SWE_CLAUDE_EXTRA_ARGS work, the latter as one shell string."""
    launch = agent.launch(with_options(SWE_CC_PROMPT="Do it.", SWE_CLAUDE_EXTRA_ARGS="--a 'b c'"))

    assert launch.files[headless_cli.PROMPT] == b"Do it."
    assert "\0--a\0b c" in "\0".join(launch.argv)


@every_agent
def test_extra_variables_reach_it(agent: Agent) -> None:
    """A variable of the request is passed, and may change the agent's behavior."""
    launch = agent.launch(with_options(extra_env={"DISABLE_AUTOUPDATER": "0", "MINE": "x"}))

    assert (launch.env["DISABLE_AUTOUPDATER"], launch.env["MINE"]) == ("0", "x")


@every_agent
def test_a_secret_is_refused_among_the_variables(agent: Agent) -> None:
    """A variable named like a credential is refused, because requests are stored permanently."""
    with pytest.raises(ConfigurationError, match=r"extra_env\.GITHUB_TOKEN.*no secrets") as refused:
        agent.launch(with_options(extra_env={"GITHUB_TOKEN": "ghp_x"}))

    assert "ghp_x" not in str(refused.value)


@pytest.mark.parametrize(
    ("agent", "name"),
    [(AGENTS[0], "ANTHROPIC_BASE_URL"), (AGENTS[0], "ANTHROPIC_MODEL"), (AGENTS[1], "HOME")],
)
def test_the_way_to_the_gateway_cannot_be_changed(agent: Agent, name: str) -> None:
    """A variable for address, key or model is refused by its name."""
    with pytest.raises(ConfigurationError, match=rf"extra_env.{name}: set by Perdure"):
        agent.launch(with_options(extra_env={name: "http://elsewhere"}))


@every_agent
def test_it_needs_a_gateway(agent: Agent) -> None:
    """Without a gateway the error says how to start one."""
    with pytest.raises(ConfigurationError, match="perdure up"):
        agent.launch(replace(TASK, gateway_url=None))


@every_agent
def test_an_unknown_option_is_refused_by_name(agent: Agent) -> None:
    """The error names the option and the agent that does not have it."""
    with pytest.raises(ConfigurationError, match=rf"agent_options.stpes: unknown.*{agent.name}"):
        agent.launch(with_options(stpes=3))


@every_agent
def test_no_call_outweighs_its_own_word(agent: Agent) -> None:
    """An agent without a model call did not run, whatever it printed."""
    stdout = said(type="result", is_error=False, terminal_reason="completed")

    assert agent.classify(ended(stdout, turns=0)) is AgentEnd.NEVER_CALLED_MODEL


@every_agent
@pytest.mark.parametrize(("cause", "end"), [("timeout", AgentEnd.LIMIT), ("oom", AgentEnd.CRASHED)])
def test_killed(agent: Agent, cause: Any, end: AgentEnd) -> None:
    """A kill by our time limit is a limit; any other kill is a crash."""
    status = ExecStatus(ExecState.KILLED, cause=cause, signal=9)

    assert agent.classify(Evidence(status, b"", b"", {}, 3)) is end


@every_agent
@pytest.mark.parametrize(
    "stdout", [b"", b"\xff\n", b"[" * 100_000, b"[]\n1\n", said(type="result"), said(type=["x"])]
)
def test_hostile_output_is_a_crash(agent: Agent, stdout: bytes) -> None:
    """A cut, foreign or hostile log is a crash and never an exception."""
    assert agent.classify(ended(stdout)) is AgentEnd.CRASHED
