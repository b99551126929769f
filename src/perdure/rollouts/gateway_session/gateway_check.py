"""The agent's route to the gateway, checked from inside the sandbox before the agent starts.

Part of the agent stage: the process that watches the agent also serves its relay.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from perdure.agents.base import EXEC_ID
from perdure.errors import NotFound
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.gateway_session.gateway_session import AgentSession
from perdure.sandboxes.base import Sandbox
from perdure.sandboxes.relay.gateway_route import Reach, open_from_inside, unreachable
from perdure.sandboxes.relay.host_relay import Relay, exec_id_of


@dataclass(frozen=True)
class GatewayRoute:
    """`url`: the gateway's URL inside the sandbox; None if the agent calls no model.

    `check` raises the error that broke the route, if there is one.
    """

    url: str | None
    check: Callable[[], None] = lambda: None


@asynccontextmanager
async def reached(
    job: Job, session: AgentSession | None, sandbox: Sandbox
) -> AsyncIterator[GatewayRoute]:
    """Raises: ConfigurationError, which names the setting, if no route works;
    GatewayUnavailable."""
    if session is None:
        yield GatewayRoute(None)
        return
    url = (await job.services.gateways.urls())[0]
    reach = await _reach(job, sandbox, url)
    if reach in ("socket", "url"):
        yield GatewayRoute(sandbox.gateway_url if reach == "socket" else url)
        return
    relay = Relay(
        sandbox,
        gateway_url=url,
        session_key=session.key,
        output_mb=job.agent_sandbox.placement.limits.output_mb,
        reads_are_cheap=job.agent_sandbox.provider.sees_host,
    )
    async with relay:
        yield GatewayRoute(relay.url, relay.check)


async def _reach(job: Job, sandbox: Sandbox, url: str) -> Reach:
    """The relay, if one runs already; otherwise the configured route.

    With `auto`, a relay replaces a URL that cannot be opened from inside.
    """
    if await _started(sandbox, exec_id_of(1)):
        return "stdio"
    reach = job.services.reach(job.agent_sandbox.placement.provider)
    if sandbox.gateway_url is not None:  # the sandbox was booted with the socket
        return "socket"
    if reach != "url" or await _started(sandbox, EXEC_ID):
        return reach
    reason = await open_from_inside(sandbox, url)
    if not reason:
        return reach
    if job.services.settings.gateway.reach != "auto":
        raise unreachable(sandbox, url, reason)
    return "stdio"


async def _started(sandbox: Sandbox, exec_id: str) -> bool:
    try:
        await sandbox.poll(exec_id)
    except NotFound:
        return False
    return True
