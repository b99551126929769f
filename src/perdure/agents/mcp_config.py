"""The MCP servers of a task, as agents write them into their own settings.

The address of an `http` or `sse` server is the gateway's, which speaks streamable HTTP to agents. Its
credential is the session key. The gateway calls the server itself, and bounds each call, so agents
wait longer than the gateway does.
"""

from collections.abc import Iterable

from perdure import variant_registry
from perdure.agents.base import Agent, AgentTask, UsesMcpServers
from perdure.errors import ConfigurationError
from perdure.types import McpServer, McpServers

GATEWAY_WAITS_S = 90.0
"""Seconds that the gateway takes, in addition to a call's own time, to find out that a server is
dead."""


def url(task: AgentTask, name: str) -> str:
    """The server's address in the sandbox."""
    return f"{task.gateway_url}/v1/mcp/{name}"


def wait_s(server: McpServer) -> float:
    """Seconds that an agent must wait for an answer, and for a server to start."""
    return server.timeout_s + GATEWAY_WAITS_S


def check(name: str, agent: Agent, servers: McpServers) -> None:
    """Raises: ConfigurationError if the agent calls a model but cannot use MCP servers."""
    if servers and agent.needs_model and not isinstance(agent, UsesMcpServers):
        raise ConfigurationError(
            f"agent {name!r} cannot use MCP servers ({', '.join(servers)}): choose one of "
            f"{', '.join(_supporting())}, or leave the servers out"
        )


def _supporting() -> Iterable[str]:
    for name in variant_registry.AGENTS:
        if isinstance(
            variant_registry.load("agent", variant_registry.AGENTS, name)(), UsesMcpServers
        ):
            yield name
