"""The sweep that kills sandboxes without an owner.

Owns the rules. The caller decides when it runs and how it looks up an owner.
"""

from collections.abc import Awaitable, Callable, Iterable

import structlog

from perdure.errors import PerdureError
from perdure.sandboxes.base import SandboxInfo, SandboxProvider
from perdure.types import Frozen

OWNER_LABELS = frozenset({"run", "rollout"})

log = structlog.get_logger()

OwnerIsAlive = Callable[[SandboxInfo], Awaitable[bool]]


class SweepReport(Frozen):
    """What one sweep did: `found` is the sum of the other three."""

    found: int = 0
    kept: int = 0
    killed: int = 0
    failed: int = 0
    """Sandboxes that could not be killed or checked, and providers that did not answer."""


async def sweep(
    providers: Iterable[SandboxProvider],
    owner_is_alive: OwnerIsAlive,
    *,
    grace_s: float,
    now: float,
) -> SweepReport:
    """Kill what has expired, and orphans older than `grace_s` (longer than the slowest create).

    A sandbox without owner labels ends only by its own deadline. If one cannot be killed, the sweep
    goes on with the others. `now`: unix seconds.
    """
    fates: list[str] = []
    for provider in providers:
        try:
            found = await provider.list()
        except PerdureError as error:
            log.warning(
                "the reaper cannot sweep a provider", provider=provider.name, reason=str(error)
            )
            fates.append("failed")
            continue
        for info in found:
            fates.append(await _settle(provider, info, owner_is_alive, grace_s, now))
    counts = {fate: fates.count(fate) for fate in ("kept", "killed", "failed")}
    return SweepReport(found=len(fates), **counts)


async def _settle(
    provider: SandboxProvider,
    info: SandboxInfo,
    owner_is_alive: OwnerIsAlive,
    grace_s: float,
    now: float,
) -> str:
    try:
        reason = await _reason_to_kill(info, owner_is_alive, grace_s, now)
        if reason is None:
            return "kept"
        log.info(
            "the reaper killed a sandbox", identity=info.identity, reason=reason, **info.labels
        )
        await provider.kill(info.identity)
    except PerdureError as error:
        log.warning("the reaper cannot kill a sandbox", identity=info.identity, reason=str(error))
        return "failed"
    return "killed"


async def _reason_to_kill(
    info: SandboxInfo, owner_is_alive: OwnerIsAlive, grace_s: float, now: float
) -> str | None:
    if info.expires <= now:
        return "expired"
    if not info.labels.keys() >= OWNER_LABELS or now - info.created < grace_s:
        return None
    return None if await owner_is_alive(info) else "orphaned"
