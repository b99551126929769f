"""Checks an agent's name and options before a sandbox boots: the agent prepares a launch for a
dummy instance. All callers get the same messages.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from perdure import variant_registry
from perdure.agents import mcp_config, user_messages
from perdure.agents.base import Agent, AgentTask
from perdure.types import Grading, Instance, McpServers, Sampling, SimulatedUser, Source, SourceKind

NOWHERE = "http://127.0.0.1:1"
NO_INSTANCE = Instance(
    instance_id="none",
    dataset="none",
    problem_statement="none",
    source=Source(kind=SourceKind.DIRECTORY),
    gold_patch=b"none",  # the oracle will not start without one
    grading=Grading(protocol="eval_cmd"),  # nor base_suite with another protocol
)


def check_options(
    name: str,
    options: Mapping[str, JsonValue],
    mcp_servers: McpServers | None = None,
    user: SimulatedUser | None = None,
) -> None:
    """Raises: ConfigurationError naming the agent, the option that is unknown or wrong, or the MCP servers
    or the user that the agent cannot have."""
    agent: Agent = variant_registry.load("agent", variant_registry.AGENTS, name)()
    mcp_config.check(name, agent, mcp_servers or {})
    user_messages.check(name, agent, user)
    agent.launch(
        AgentTask(
            instance=NO_INSTANCE,
            workdir=NO_INSTANCE.environment.workdir,
            gateway_url=NOWHERE,
            session_key="",
            model="policy",
            sampling=Sampling(),
            budget_s=1.0,
            options=options,
        )
    )
