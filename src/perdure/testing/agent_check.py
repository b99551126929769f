"""The published conformance run of an agent: its own program in a sandbox, a policy without a model.

`perdure agents check` prints its results, and docs/agents.md shows them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perdure.agents.base import Agent, UsesMcpServers
from perdure.agents.locked_version import locked_version
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.agent_stand import Run, Stand, Start
from perdure.testing.mcp_server import RESULT, mcp_server
from perdure.testing.tool_reading_policy import (
    SHELLS,
    SUB_AGENTS,
    ToolReadingPolicy,
    named,
    offered,
)
from perdure.types import AgentEnd, Outcome, Purpose

BUDGET_S = 600.0
"""Time limit of one run of the agent. Only an agent that hangs reaches it."""
NO_MCP = "it takes MCP servers, but the answer of a server's tool did not reach its model"
UNTRAINED = (Purpose.SIDE, Purpose.STRAY)


@dataclass(frozen=True)
class AgentCheck:
    """What works, as text for the table.

    Example:
        AgentCheck(agent="opencode", version="1.18.33", streaming="yes", tools="bash",
                   sub_agents="own chain", resume="4/4", mcp="yes", trained="all", problem="")
    """

    agent: str
    version: str
    """Of its program; empty without a lock."""
    streaming: str
    """Whether the gateway streamed its answers."""
    tools: str
    """The tool that ran the policy's commands; `text` if it offers none."""
    sub_agents: str
    """`own chain`; `main` if their turns cannot be told from its own; `none` if it offers none."""
    resume: str
    """`N/M`: the next attempt replayed N of the M turns of a lost attempt."""
    mcp: str
    """Whether the answer of an MCP server's tool reached its model through the gateway; `none` if it
    refuses servers."""
    trained: str
    """How many of the sampled tokens are trained, side requests excluded."""
    problem: str
    """Why a run did not solve the task, or `NO_MCP`; empty if all is well."""


async def check(stand: Stand, agent: Agent, options: Mapping[str, Any] | None = None) -> AgentCheck:
    """Run the agent, repeat the run as if its sandbox were lost, and run it with a sub-agent and with
    an MCP server if it can use them.

    Raises: ConfigurationError, AgentError, MissingDependency.
    """
    start = Start(budget_s=BUDGET_S, options=options or {})
    async with stand.served(lambda _: ToolReadingPolicy()) as served:
        first = await stand.attempt(served, agent, start)
        streams = served.link.streams
        again = await stand.attempt(served, agent, start, number=2)
    runs, sub_agents = [first, again], "none"
    if _tool(first, SUB_AGENTS):
        async with stand.served(lambda _: ToolReadingPolicy(delegates=True)) as served:
            runs.append(await stand.attempt(served, agent, start))
        sub_agents = _sub_agents(runs[-1])
    mcp = "none"
    if isinstance(agent, UsesMcpServers):
        runs.append(await _with_mcp_server(stand, agent, start))
        mcp = _mcp(runs[-1])
    problems = [*map(_problem, runs), NO_MCP if mcp == "no" else ""]
    return AgentCheck(
        agent=agent.name,
        version=locked_version(agent.name),
        streaming="yes" if streams else "no",
        tools=_tool(first, SHELLS) or "text",
        sub_agents=sub_agents,
        resume=f"{again.summary.replayed_turns}/{len(first.turns)}",
        mcp=mcp,
        trained=_trained(runs),
        problem=next(filter(None, problems), ""),
    )


def table(checks: Sequence[AgentCheck]) -> str:
    """A Markdown table."""
    rows = [
        ("agent", "streaming", "tools", "sub-agents", "resume", "MCP", "trained"),
        ("---",) * 7,
        *(
            (f"`{c.agent}`", c.streaming, c.tools, c.sub_agents, c.resume, c.mcp, c.trained)
            for c in checks
        ),
    ]
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def _tool(run: Run, names: Sequence[str]) -> str:
    """The first of these tools that the agent offers; empty if none."""
    reader = load_tokenizer("qwen3")
    prompts = (reader.decode(list(turn.prompt_ids)) for turn in run.steps())
    tools = (named(offered(prompt), names) for prompt in prompts)
    return next((str(tool["name"]) for tool in tools if tool), "")


def _sub_agents(run: Run) -> str:
    return "own chain" if {turn.chain for turn in run.steps()} - {"main"} else "main"


def _looks_for_mcp(_: object) -> ToolReadingPolicy:
    return ToolReadingPolicy(has_mcp_server=True)


async def _with_mcp_server(stand: Stand, agent: Agent, start: Start) -> Run:
    async with mcp_server() as server, stand.served(_looks_for_mcp) as served:
        return await stand.attempt(served, agent, replace(start, mcp_servers={"check": server}))


def _mcp(run: Run) -> str:
    """The gateway calls the server, because the sandbox cannot reach it."""
    return "yes" if any(RESULT in turn.new_messages for turn in run.turns) else "no"


def _trained(runs: Sequence[Run]) -> str:
    trained = sum(run.trained() for run in runs)
    turns = [turn for run in runs for turn in run.turns if turn.purpose not in UNTRAINED]
    sampled = sum(turn.sampled_tokens for turn in turns)
    return "all" if trained == sampled else f"{trained}/{sampled}"


def _problem(run: Run) -> str:
    if (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED):
        return ""
    said = " | ".join(run.said.split("\n")[-6:])[-1000:]
    return f"the agent ended {run.end} and its patch is {run.grade.outcome}: {said}"
