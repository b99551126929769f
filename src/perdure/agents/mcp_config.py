"""The MCP servers of a task, as agents write them into their own settings.

An agent reaches an `http` or `sse` server outside the sandbox at the gateway, which speaks streamable
HTTP, with the session key. The gateway calls the server itself, and bounds each call, so agents wait
longer than the gateway does. An agent calls a server in the sandbox at the server's own address,
without a key.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from perdure import variant_registry
from perdure.agents.base import Agent, AgentTask, UsesMcpServers
from perdure.errors import ConfigurationError
from perdure.types import McpServer, McpServers
from perdure.types.mcp_servers import VARIABLE

EXPANDED = re.compile(r"[${]")
"""In their own settings, some agents replace `$NAME` and `{file:PATH}`, also by the session key."""
GATEWAY_WAITS_S = 90.0
"""Seconds that the gateway takes, in addition to a call's own time, to find out that a server is
dead."""


def gateway_url(task: AgentTask, name: str) -> str:
    """The address of a server behind the gateway."""
    return f"{task.gateway_url}/v1/mcp/{name}"


@dataclass(frozen=True)
class Address:
    """How an agent reaches an `http` or `sse` server from its sandbox."""

    url: str
    transport: Literal["http", "sse"]
    headers: Mapping[str, str]


def address(task: AgentTask, name: str, *, key: str) -> Address | None:
    """None for a server on stdio. `key`: the session key, as the agent's settings write it."""
    server = task.mcp_servers[name]
    if server.is_behind_gateway:
        headers = {"Authorization": f"Bearer {key}"}
        return Address(gateway_url(task, name), "http", headers)
    if server.type == "stdio":
        return None
    return Address(server.url, server.type, server.headers)


def wait_s(server: McpServer) -> float:
    """Seconds that an agent must wait for an answer, and for a server to start."""
    return server.timeout_s + GATEWAY_WAITS_S


def check(name: str, agent: Agent, servers: McpServers) -> None:
    """Raises: ConfigurationError if the agent calls a model but cannot use the servers."""
    if not agent.needs_model:
        return
    for other, server in servers.items():
        secret = [header for header, value in server.headers.items() if VARIABLE.search(value)]
        if server.in_sandbox and secret:
            raise ConfigurationError(
                f"MCP server {other!r} at {server.url} is in the sandbox, which gets no secrets: "
                f"remove the header {', '.join(secret)}"
            )
        if server.in_sandbox and any(map(EXPANDED.search, (server.url, *server.headers.values()))):
            raise ConfigurationError(
                f"MCP server {other!r} in the sandbox: remove `$` and `{{` from its url and headers, "
                "which agents would expand"
            )
    if servers and not isinstance(agent, UsesMcpServers):
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
