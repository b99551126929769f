"""The published conformance run of an agent: its own program in a sandbox, a policy without a model.

`perdure agents check` prints its results, and docs/agents.md shows them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.agents.base import Agent
from perdure.agents.locked_version import locked_version
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.agent_stand import Run, Stand, Start
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
UNTRAINED = (Purpose.SIDE, Purpose.STRAY)


@dataclass(frozen=True)
class AgentCheck:
    """What works, as text for the table.

    Example:
        AgentCheck(agent="opencode", version="1.18.33", streaming="yes", tools="bash",
                   sub_agents="own chain", resume="4/4", trained="all", problem="")
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
    trained: str
    """How many of the sampled tokens are trained, side requests excluded."""
    problem: str
    """Why a run did not solve the task; empty if all did."""


async def check(stand: Stand, agent: Agent, options: Mapping[str, Any] | None = None) -> AgentCheck:
    """Run the agent, repeat the run as if its sandbox were lost, and run it with a sub-agent if it
    has one.

    Raises: ConfigurationError, AgentError, MissingDependency.
    """
    start = Start(budget_s=BUDGET_S, options=options or {})
    async with stand.served(lambda _: ToolReadingPolicy()) as served:
        first = await stand.attempt(served, agent, start)
        streams = served.link.streams
        again = await stand.attempt(served, agent, start, number=2)
    runs = [first, again]
    if has_sub_agents := _tool(first, SUB_AGENTS) != "":
        async with stand.served(lambda _: ToolReadingPolicy(delegates=True)) as served:
            runs.append(await stand.attempt(served, agent, start))
    return AgentCheck(
        agent=agent.name,
        version=locked_version(agent.name),
        streaming="yes" if streams else "no",
        tools=_tool(first, SHELLS) or "text",
        sub_agents=_sub_agents(runs[-1]) if has_sub_agents else "none",
        resume=f"{again.summary.replayed_turns}/{len(first.turns)}",
        trained=_trained(runs),
        problem=next((problem for run in runs if (problem := _problem(run))), ""),
    )


def table(checks: Sequence[AgentCheck]) -> str:
    """A Markdown table."""
    rows = [
        ("agent", "streaming", "tools", "sub-agents", "resume", "trained"),
        ("---",) * 6,
        *(
            (f"`{c.agent}`", c.streaming, c.tools, c.sub_agents, c.resume, c.trained)
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
