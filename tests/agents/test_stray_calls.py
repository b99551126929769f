"""Code that an agent runs calls the model with the agent's key, under each agent from its registry."""

import re
import shlex
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from perdure.agents.acp import Acp
from perdure.agents.acp_servers import SERVERS
from perdure.agents.base import Agent
from perdure.agents.claude_code import ClaudeCode
from perdure.agents.codex import Codex
from perdure.agents.gemini_cli import GeminiCli
from perdure.agents.mini_swe_agent import MiniSweAgent
from perdure.agents.opencode import Opencode
from perdure.agents.openhands import Openhands
from perdure.agents.qwen_code import QwenCode
from perdure.agents.r2e_gym import R2eGym
from perdure.agents.smolagents import Smolagents
from perdure.errors import MissingDependency
from perdure.testing.agent_stand import Stand, call, script
from perdure.types import AgentEnd, Purpose

pytestmark = pytest.mark.registry

HIDDEN = r"""
import glob, json, os, re, urllib.request
key = re.compile(rb"s-1\.[0-9a-f]{64}")
def first(*patterns):
    for path in (path for pattern in patterns for path in glob.glob(pattern, recursive=True)):
        try:
            if found := key.search(open(path, "rb").read(1 << 20)):
                return path, found[0].decode()
        except OSError:
            pass
    return "", ""
place, found = first("/proc/[0-9]*/environ", os.path.expanduser("~/**"), os.path.expanduser("~/.*/**"))
body = {"model": "policy", "messages": [{"role": "user", "content": "QUESTION of the tests"}]}
headers = {"authorization": f"Bearer {found}", "content-type": "application/json"}
asked = urllib.request.Request("http://127.0.0.1:18001/v1/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
marks = ("s-1.", "18001", "x-perdure-agent")
inherited = [name for name, value in os.environ.items() if any(mark in value for mark in marks)]
print("HIDDEN", place, *inherited, answer, "END")
"""
"""A test suite's call of the model, with the key wherever it is."""
COMMAND = f"python3 -c {shlex.quote(HIDDEN)}"
DONE = {"content": "Nothing to do."}
ANSWER = "ANSWER to the tests"


class Case(NamedTuple):
    agent: Agent
    run: Callable[[str], dict[str, Any]]
    """A scripted turn in which the agent runs this command."""
    last: dict[str, Any] = DONE
    first: tuple[dict[str, Any], ...] = ()
    """An answer that no model gave, at the start of the agent's history."""
    options: Mapping[str, str] = MappingProxyType({})


CASES = [
    Case(ClaudeCode(), lambda command: call("Bash", command=command)),
    Case(Codex(), lambda command: call("exec_command", cmd=command)),
    Case(Opencode(), lambda command: call("bash", command=command, description="tests")),
    Case(
        QwenCode(),
        lambda command: call("run_shell_command", command=command, is_background=False),
        first=(DONE,),
    ),
    Case(GeminiCli(), lambda command: call("run_shell_command", command=command)),
    Case(
        Openhands(),
        lambda command: call("terminal", command=command),
        last=call("finish", message="Nothing to do."),
    ),
    Case(
        R2eGym(),
        lambda command: call("execute_bash", cmd=command),
        last=call("finish", command="submit"),
    ),
    Case(
        Smolagents(),
        lambda command: {"content": f"Now.\n<code>\nprint(bash({command!r}))\n</code>"},
        last={"content": "Now.\n<code>\nfinal_answer('Nothing to do.')\n</code>"},
    ),
    *(
        Case(
            MiniSweAgent(),
            lambda command: call("bash", command=command),
            last=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            options={"client": client},
        )
        for client in ("litellm", "direct")
    ),
]
CASES += [
    Case(Acp(), case.run, options={"server": case.agent.name})
    for case in CASES
    if case.agent.name in SERVERS
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join((case.agent.name, *case.options.values()))
)
async def test_a_call_of_code_under_test_is_not_the_agents(stand: Stand, case: Case) -> None:
    """It is answered and recorded, in a chain of its own, and no token of it is trained. The command
    inherits neither key, address, nor header of the agent."""
    if isinstance(case.agent, Openhands):
        _skip_without_python(stand)
    run = await stand.run(
        case.agent,
        script(*case.first, case.run(COMMAND), case.last, match="calc.py"),
        asked={"QUESTION": {"content": ANSWER}},
        options=case.options,
    )
    stray = [turn for turn in run.turns if turn.purpose is Purpose.STRAY]
    own = [turn for turn in run.turns if turn.purpose not in (Purpose.STRAY, Purpose.SIDE)]
    told = " ".join(turn.new_messages for turn in own)
    seen = re.search(r"HIDDEN /\S+ (.*?) END", told)

    assert run.end is AgentEnd.FINISHED, run.said
    assert [turn.chain for turn in stray] == ["stray"]
    assert seen is not None, told[-2000:]
    assert seen[1] == ANSWER, seen[0]
    assert {turn.chain for turn in own} == {"main"}
    assert run.trained() == sum(turn.sampled_tokens for turn in own)
    run.assert_token_exact()


def _skip_without_python(stand: Stand) -> None:
    try:
        Openhands().check_host(stand.agents)
    except MissingDependency as missing:
        pytest.skip(str(missing))
