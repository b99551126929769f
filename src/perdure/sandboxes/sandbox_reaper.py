"""The sweep that kills sandboxes without an owner.

Owns the rules. The caller decides when it runs and how it looks up an owner.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from perdure.errors import PerdureError
from perdure.sandboxes.base import SandboxInfo, SandboxProvider
from perdure.types import Frozen

OWNER_LABELS = frozenset({"run", "rollout"})
ORPHANED = "orphaned"
AT_ONCE = 8
"""Sandboxes that a sweep handles at once: on an overloaded host, each takes seconds to kill."""

log = structlog.get_logger()


class Owner(StrEnum):
    """What is known about the rollout that a sandbox belongs to."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """No record of it exists: it may belong to another deployment, or start again."""


OwnerOf = Callable[[SandboxInfo], Awaitable[Owner]]
Orphaned = Callable[[SandboxInfo], Awaitable[None]]


class SweepReport(Frozen):
    """What one sweep did: `found` is the sum of the other three."""

    found: int = 0
    kept: int = 0
    killed: int = 0
    failed: int = 0
    """Sandboxes that could not be killed or checked, and providers that did not answer."""


@dataclass(frozen=True)
class Sweep:
    """The rules of one sweep. `now`: unix seconds."""

    owner_of: OwnerOf
    orphaned: Orphaned
    """Called before an orphan is killed."""
    grace_s: float
    """Age in seconds at which a sandbox with an unknown owner is killed."""
    now: float

    async def over(self, providers: Iterable[SandboxProvider]) -> SweepReport:
        """Kill sandboxes that have expired, whose owner has ended, or whose owner is still unknown
        after the grace period.

        A sandbox without owner labels ends only by its own deadline. If one cannot be killed, the
        sweep continues with the others.
        """
        fates: list[str] = []
        for provider in providers:
            try:
                found = await provider.list()
            except PerdureError as error:
                log.warning("provider not swept", provider=provider.name, reason=str(error))
                fates.append("failed")
                continue
            fates += await self._settled(provider, found)
        counts = {fate: fates.count(fate) for fate in ("kept", "killed", "failed")}
        return SweepReport(found=len(fates), **counts)

    async def _settled(self, provider: SandboxProvider, found: Iterable[SandboxInfo]) -> list[str]:
        seats = asyncio.Semaphore(AT_ONCE)

        async def settle(info: SandboxInfo) -> str:
            async with seats:
                return await self._settle(provider, info)

        return await asyncio.gather(*map(settle, found))

    async def _settle(self, provider: SandboxProvider, info: SandboxInfo) -> str:
        try:
            reason = await self._reason_to_kill(info)
            if reason is None:
                return "kept"
            log.info("sandbox swept", identity=info.identity, reason=reason, **info.labels)
            if reason == ORPHANED:
                await self.orphaned(info)
            await provider.kill(info.identity)
        except (PerdureError, OSError, ValueError) as error:  # this sandbox's; the others are swept
            log.warning("sandbox not swept", identity=info.identity, reason=repr(error))
            return "failed"
        return "killed"

    async def _reason_to_kill(self, info: SandboxInfo) -> str | None:
        if info.expires <= self.now:
            return "expired"
        if not info.labels.keys() >= OWNER_LABELS:
            return None
        owner = await self.owner_of(info)
        young = self.now - info.created < self.grace_s
        if owner is Owner.ALIVE or (owner is Owner.UNKNOWN and young):
            return None
        return ORPHANED
