"""The MCP servers that a task brings in its sandbox: programs, and addresses of its sidecars.

Agents start without a tool whose server they do not reach. So a server must be there before the agent
starts, and a sidecar's must still be there when the agent has ended.
"""

from asyncio import sleep
from urllib.parse import urlsplit

from perdure.errors import InstanceError, SandboxLost
from perdure.rollouts.attempt_job import Job
from perdure.sandboxes.base import Sandbox
from perdure.types import McpServer
from perdure.types.containers import LOOPBACK, MAIN

STARTS_S = 60
"""Seconds that a server may take to listen, once its sidecar runs and is healthy."""
LISTENS = "0A"
"""The state of a listening socket in the kernel's tables."""


async def wait_until_ready(job: Job, sandbox: Sandbox) -> None:
    """Raises: InstanceError for an absent program; SandboxLost for an address where nothing listens."""
    if not job.agent.needs_model:
        return
    for name, server in job.mcp_servers.items():
        if server.in_sandbox:
            await _wait_until_listening(name, server, sandbox)
        elif not server.has_address:
            await _find_program(name, server, sandbox)


async def dead_server(job: Job, sandbox: Sandbox) -> str:
    """What is wrong with a sidecar's server now; empty if nothing is. What the agent itself may have
    ended, a server of its own container, is its own fault."""
    if not job.agent.needs_model:
        return ""
    for name, server in job.mcp_servers.items():
        is_sidecar = server.in_sandbox and _host(server) not in (*LOOPBACK, MAIN)
        if is_sidecar and _port(server) not in await _listening(sandbox):
            return f"MCP server {name!r} at {server.url} ended while the agent ran"
    return ""


async def _wait_until_listening(name: str, server: McpServer, sandbox: Sandbox) -> None:
    for _ in range(STARTS_S):
        if _port(server) in await _listening(sandbox):
            return
        await sleep(1)
    raise SandboxLost(
        f"MCP server {name!r} at {server.url}: for {STARTS_S} s, nothing listened there in sandbox "
        f"{sandbox.identity}; a health check of its service can wait longer"
    )


async def _find_program(name: str, server: McpServer, sandbox: Sandbox) -> None:
    found = await sandbox.exec(["sh", "-c", 'command -v "$0"', server.command])
    if not found.status.ok:
        raise InstanceError(
            f"MCP server {name!r} needs the program {server.command!r}, which the sandbox does "
            "not have: add it to the image, or serve it over HTTP"
        )


async def _listening(sandbox: Sandbox) -> set[int]:
    """The TCP ports that somebody listens on in the network of the sandbox and its sidecars."""
    tables = await sandbox.exec(
        ["cat", "/proc/net/tcp", "/proc/net/tcp6"]
    )  # the second may be absent
    rows = (line.split() for line in tables.stdout.decode("ascii", "replace").splitlines())
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == LISTENS
    }


def _host(server: McpServer) -> str | None:
    return urlsplit(server.url).hostname


def _port(server: McpServer) -> int:
    parts = urlsplit(server.url)
    return parts.port or (443 if parts.scheme == "https" else 80)
