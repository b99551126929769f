"""A real MCP server and each agent that takes one, over HTTP through the gateway and on stdio."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from perdure import variant_registry
from perdure.agents.base import Agent
from perdure.testing.agent_stand import Run, Stand, call, script
from perdure.types import AgentEnd
from tests.agents import calculator

pytestmark = pytest.mark.registry


class Case(NamedTuple):
    agent: str
    prefix: str
    """What the agent puts before the names of the server's tools."""
    options: Mapping[str, Any] = {}


DONE = {"content": "It is done."}
CASES = [
    Case("claude_code", "mcp__calc__"),
    Case("codex", "mcp__calc__"),
    Case("gemini_cli", "mcp_calc_"),
    Case("qwen_code", "mcp__calc__"),
    Case("opencode", "calc_"),
    Case("openhands", ""),
    Case("acp", "mcp__calc__", {"server": "claude_code"}),
    Case("acp", "mcp__calc__", {"server": "codex"}),
    Case("acp", "mcp_calc_", {"server": "gemini_cli"}),
    Case("acp", "calc_", {"server": "opencode"}),
]


def label(case: Case) -> str:
    return "-".join([case.agent, *case.options.values()])


every_agent = pytest.mark.parametrize("case", CASES, ids=label)


async def played(stand: Stand, case: Case, kind: str, *tools: dict[str, Any]) -> Run:
    """The agent calls these tools of the calculator, named without the prefix, and is done."""
    agent: Agent = variant_registry.load("agent", variant_registry.AGENTS, case.agent)()
    opening = [{"content": "Got it."}] if case.agent == "qwen_code" else []
    named = [
        {**one, "tool_calls": [{**c, "name": case.prefix + c["name"]} for c in one["tool_calls"]]}
        for one in tools
    ]
    scripts = script(*opening, *named, DONE, match="calc.py")
    sdk = await calculator.installed(stand.tools)
    if kind.startswith("inside "):
        kind = kind.removeprefix("inside ")
        servers = {"calc": calculator.in_sandbox(kind)}
        mounted, options = calculator.mounts(sdk), case.options
        agent = calculator.beside(agent, kind)
        return await stand.run(
            agent, scripts, mcp_servers=servers, mounted=mounted, options=options
        )
    if kind == "stdio":
        servers = {"calc": calculator.on_stdio()}
        mounted, options = calculator.mounts(sdk), case.options
        return await stand.run(
            agent, scripts, mcp_servers=servers, mounted=mounted, options=options
        )
    with calculator.served(sdk, kind=kind) as server:
        servers = {"calc": server.as_server()}
        return await stand.run(agent, scripts, mcp_servers=servers, options=case.options)


def seen(run: Run) -> str:
    """What the agent told the model."""
    return "".join(turn.new_messages for turn in run.turns)


@pytest.fixture(autouse=True)
def _credential(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway has it, and so the agents' sandboxes need none."""
    monkeypatch.setenv("MCP_CALCULATOR", calculator.TOKEN)


@every_agent
async def test_a_tool_over_http(stand: Stand, case: Case) -> None:
    """Result and error reach the model, and both calls are recorded."""
    await _adds_and_fails(stand, case, "http")


@pytest.mark.parametrize("case", CASES[:4], ids=label)
async def test_a_tool_over_sse(stand: Stand, case: Case) -> None:
    """The agent speaks streamable HTTP to the gateway, which speaks `sse` to the server."""
    await _adds_and_fails(stand, case, "sse")


async def _adds_and_fails(stand: Stand, case: Case, kind: str) -> None:
    adds, fails = call("add", a=20, b=22), call("divide", a=1, b=0)
    run = await played(stand, case, kind, adds, fails)
    recorded = [(one["server"], one["tool"], one["is_error"]) for one in stand.mcp_calls]

    assert run.end is AgentEnd.FINISHED, run.said
    assert "the sum is 42" in seen(run), run.said
    assert recorded == [("calc", "add", False), ("calc", "divide", True)]
    assert run.summary.mcp_failed == ""
    assert calculator.TOKEN not in seen(run) + run.said
    run.assert_token_exact()


@pytest.mark.parametrize("case", CASES[:-1], ids=label)
async def test_a_tool_on_stdio(stand: Stand, case: Case) -> None:
    """The agent starts the server in its sandbox."""
    run = await played(stand, case, "stdio", call("add", a=20, b=22))

    assert run.end is AgentEnd.FINISHED, run.said
    assert "the sum is 42" in seen(run), run.said


@every_agent
async def test_a_tool_of_the_sandbox(stand: Stand, case: Case) -> None:
    """The server answers 401 to any key, so the agent sends none."""
    run = await played(stand, case, "inside http", call("add", a=20, b=22))

    assert run.end is AgentEnd.FINISHED, run.said
    assert "the sum is 42" in seen(run), run.said
    run.assert_token_exact()


@pytest.mark.parametrize("case", [*CASES[:1], *CASES[2:6], CASES[6], CASES[8]], ids=label)
async def test_a_tool_of_the_sandbox_over_sse(stand: Stand, case: Case) -> None:
    """All agents but Codex, which has no such transport and refuses the server."""
    run = await played(stand, case, "inside sse", call("add", a=20, b=22))

    assert run.end is AgentEnd.FINISHED, run.said
    assert "the sum is 42" in seen(run), run.said


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_server_that_dies_in_a_call_fails_the_session(stand: Stand, kind: str) -> None:
    """The attempt must then end without a verdict: the policy never causes it."""
    run = await played(stand, CASES[1], kind, call("die"))

    assert "MCP server 'calc' at 127.0.0.1" in run.summary.mcp_failed
    assert [(one["tool"], one["ended"]) for one in stand.mcp_calls] == [("die", "unanswered")]
