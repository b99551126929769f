"""The agent's way to the gateway, looked at from inside the sandbox before the agent starts.

Part of run_agent: a relay is served for as long as the agent is watched, by whoever watches it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from activities.messages import Attempt
from activities.services import Services
from perdure.agents.base import EXEC_ID
from perdure.errors import NotFound
from perdure.sandboxes.base import Sandbox
from perdure.sandboxes.relay.choice import Reach, open_from_inside, unreachable
from perdure.sandboxes.relay.relay import CARRIERS, CarrierName, Relay, exec_id_of


@dataclass(frozen=True)
class Way:
    """`url`: the gateway as the agent sees it. `check` raises what ended the way, if anything did."""

    url: str | None
    check: Callable[[], None] = lambda: None


@asynccontextmanager
async def reached(services: Services, attempt: Attempt, sandbox: Sandbox) -> AsyncIterator[Way]:
    """Raises: ConfigurationError naming the setting when no way leads there; GatewayUnavailable."""
    request, settings = attempt.request, services.settings
    if not services.agent(request.agent).needs_model:
        yield Way(None)
        return
    place = await services.place(request, "agent")
    reach = await _reach(services, place.provider, sandbox)
    if reach in ("socket", "url"):
        yield Way(sandbox.gateway_url if reach == "socket" else settings.gateway_base_url)
        return
    relay = Relay(
        sandbox,
        cast(CarrierName, reach),
        gateway_url=settings.gateway_base_url,
        session_key=services.gateway.key(services.agent_identity(request, attempt.attempt)),
        output_mb=place.limits.output_mb,
        near=services.provider(place.provider).sees_host,
    )
    async with relay:
        yield Way(relay.url, relay.check)


async def _reach(services: Services, provider: str, sandbox: Sandbox) -> Reach:
    """What runs already stays; else the choice, and for `auto` a relay where the URL does not open."""
    if (left := await _left_running(sandbox)) is not None:
        return left
    reach, url = services.reach(provider), services.settings.gateway_base_url
    if sandbox.gateway_url is not None:  # booted with the socket, whatever was set meanwhile
        return "socket"
    if reach != "url" or await _started(sandbox):
        return reach
    reason = await open_from_inside(sandbox, url)
    if not reason:
        return reach
    if services.settings.gateway.reach != "auto":
        raise unreachable(sandbox, url, reason)
    return "dial" if services.provider(provider).dials else "stdio"


async def _left_running(sandbox: Sandbox) -> Reach | None:
    """The carrier with which an earlier watcher served this sandbox."""
    for name in CARRIERS:
        try:
            await sandbox.poll(exec_id_of(name, 1))
        except NotFound:
            continue
        return name
    return None


async def _started(sandbox: Sandbox) -> bool:
    try:
        await sandbox.poll(EXEC_ID)
    except NotFound:
        return False
    return True
