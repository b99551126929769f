"""Waits for the MCP servers in a task's sandbox: programs, and servers with an address, such as a
sidecar's.

An agent that cannot reach a server starts without its tools. So each server must be there before the
agent starts, and a sidecar's must still listen when the agent has ended.
"""

from asyncio import sleep
from urllib.parse import urlsplit

from perdure.errors import InstanceError, NotFound, SandboxLost
from perdure.rollouts.attempt_job import Job
from perdure.sandboxes.base import Sandbox
from perdure.types import McpServer

STARTS_S = 60
"""Seconds that a server may take to listen, once its sidecar runs and is healthy."""
LOOKS = 5
"""Times to look, once a second, for a sidecar's server after the agent, because it may be starting
again."""
READ_TABLES = ("cat", "/proc/net/tcp", "/proc/net/tcp6")
"""The second table may be absent."""
READ_S = 30.0
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
    """Says which sidecar's MCP server no longer listens; empty if all do. A server in the agent's own
    container does not count, because the agent may have stopped it."""
    provider = job.services.provider(job.agent_sandbox.placement.provider)
    if not job.agent.needs_model or not provider.reads_sidecars:
        return ""
    for name, server in job.mcp_servers.items():
        sidecar = _sidecar_of(server, job) if server.in_sandbox else None
        if sidecar is not None and not await _still_listens(server, sidecar, sandbox):
            return (
                f"nothing listened at {server.url}, MCP server {name!r}, when the agent had ended"
            )
    return ""


async def _wait_until_listening(name: str, server: McpServer, sandbox: Sandbox) -> None:
    for _ in range(STARTS_S):
        tables = await sandbox.exec(READ_TABLES, timeout=READ_S)
        if _port(server) in _listening(tables.stdout):
            return
        await sleep(1)
    raise SandboxLost(
        f"MCP server {name!r}: nothing listened at {server.url} in sandbox {sandbox.identity} for "
        f"{STARTS_S} s; if it needs longer, give its service a health check"
    )


async def _still_listens(server: McpServer, sidecar: str, sandbox: Sandbox) -> bool:
    """Asks in the sidecar's container, whose programs the agent cannot replace. Without `cat` there,
    it counts as listening."""
    for _ in range(LOOKS):
        try:
            tables = await sandbox.sidecar_exec(sidecar, READ_TABLES, timeout_s=READ_S)
        except NotFound:  # it has ended
            return False
        if not tables.stdout or _port(server) in _listening(tables.stdout):
            return True
        await sleep(1)
    return False


async def _find_program(name: str, server: McpServer, sandbox: Sandbox) -> None:
    found = await sandbox.exec(["sh", "-c", 'command -v "$0"', server.command])
    if not found.status.ok:
        raise InstanceError(
            f"MCP server {name!r} needs the program {server.command!r}, which the sandbox does "
            "not have: add it to the image, or serve it over HTTP"
        )


def _sidecar_of(server: McpServer, job: Job) -> str | None:
    """The sidecar that the server's address names."""
    host = urlsplit(server.url).hostname
    for name, sidecar in job.instance.environment.sidecars.items():
        if host in [other.lower() for other in (name, *sidecar.aliases)]:
            return name
    return None


def _listening(tables: bytes) -> set[int]:
    """The TCP ports on which a program of the sandbox or of its sidecars listens."""
    rows = (line.split() for line in tables.decode("ascii", "replace").splitlines())
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == LISTENS
    }


def _port(server: McpServer) -> int:
    parts = urlsplit(server.url)
    return parts.port or (443 if parts.scheme == "https" else 80)
