"""Ready sandboxes: booted ahead of the rollouts that will use them; bounded, short-lived, used once.

A worker keeps them for the specs it has booted lately and gives each to one rollout at most. Those
that a killed worker leaves end at their own deadline. The store says which rollout took one, so
that the reaper can tell whether it still has an owner.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import uuid4

import structlog

from perdure.errors import NotFound, PerdureError, RateLimited, SandboxLost
from perdure.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from perdure.settings.tree import Settings
from perdure.storage import keys
from perdure.storage.base import Store

log = structlog.get_logger("perdure.ready")

LIFE_S = 600.0
"""A ready sandbox that no rollout takes ends after this time, by its provider or the reaper. So does
one whose rollout's worker died just after it took it. A rollout that uses one extends its life."""
LEAST_LEFT_S = 60.0
"""A ready sandbox with less time left is not given to a rollout."""
MARK = "-ready-"
"""Part of the identity of every sandbox that was booted ahead."""
OWNER = "ready/"
"""Begins the `rollout` label of a sandbox that no rollout has taken yet."""

GIVEN_WAY = b"given way"
"""Written into a claim instead of a rollout's id while the sandbox is ended to free its permit for
a waiting rollout."""


class Permits(Protocol):
    """Permits of the provider's account for ready sandboxes, by the identity of the sandbox."""

    async def reserve(self, identity: str) -> bool:
        """A permit that no rollout waits for; False: none is free."""
        ...

    async def is_up(self, identity: str) -> None:
        """The sandbox exists now."""
        ...

    async def refused(self, identity: str, error: RateLimited) -> None:
        """The provider answered 429 to its create."""
        ...

    async def release(self, identity: str) -> None:
        """The sandbox is gone."""
        ...


class Unmetered:
    """Permits of a provider without an account: there is always one."""

    async def reserve(self, identity: str) -> bool:
        return True

    async def is_up(self, identity: str) -> None: ...

    async def refused(self, identity: str, error: RateLimited) -> None: ...

    async def release(self, identity: str) -> None: ...


@dataclass(frozen=True)
class _Ready:
    sandbox: Sandbox
    until: float
    permits: Permits

    async def end(self) -> None:
        with contextlib.suppress(PerdureError):
            await self.sandbox.kill()
        await self.permits.release(self.sandbox.identity)


class ReadySandboxes:
    """The ready sandboxes of one worker process: up to `sandbox.ready` a spec, and in all."""

    def __init__(self, settings: Settings, store: Store, labels: Mapping[str, str]) -> None:
        self._most = settings.sandbox.ready_total
        self._each = min(settings.sandbox.ready, self._most)
        self._store = store
        self._labels = labels
        self._kept: dict[str, deque[_Ready]] = {}
        """By key of the spec; the spec used last is at the end."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def take(
        self, provider: SandboxProvider, spec: SandboxSpec, rollout: str, taking: str
    ) -> Sandbox | None:
        """An unused sandbox of this spec, which is now this rollout's; None: boot one.

        It lives for LIFE_S from now. Call `refill` when the rollout has recorded its sandbox.
        `taking`: key in the store that tells the next try what this one took, if this one dies.
        """
        if not self._each:
            return None
        found = await self.taken_before(provider, rollout, taking)
        return found or await self._take(spec_key(provider, spec), rollout, taking)

    def refill(self, provider: SandboxProvider, spec: SandboxSpec, permits: Permits) -> None:
        """Boot more of this spec in the background, as far as `permits` has free permits."""
        if not self._each:
            return
        key = spec_key(provider, spec)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._fill(key, provider, spec, permits))

    async def filled(self) -> None:
        """Wait until nothing is being booted ahead."""
        await asyncio.gather(*self._tasks.values())

    async def close(self) -> None:
        """Kill all that are kept."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for queue in self._kept.values():
            await self._end(queue)

    async def taken_before(
        self, provider: SandboxProvider, rollout: str, taking: str
    ) -> Sandbox | None:
        """The sandbox that an earlier try had taken before it died."""
        if not self._each:
            return None
        identity = await taken_by(self._store, rollout, taking)
        if identity is None:
            return None
        try:
            sandbox = await provider.attach(identity)
            await sandbox.touch(LIFE_S)
        except (NotFound, SandboxLost):
            await self.forget(identity)
            return None
        return sandbox

    async def _take(self, key: str, rollout: str, taking: str) -> Sandbox | None:
        queue = self._kept.pop(key, deque())
        self._kept[key] = queue
        while queue:
            ready = queue.popleft()
            if ready.until - time.monotonic() < LEAST_LEFT_S:
                await ready.end()
                continue
            try:
                await self._store.put(taking, ready.sandbox.identity.encode())
                claim = keys.claim(ready.sandbox.identity)
                if not await self._store.put_if_absent(claim, rollout.encode()):
                    continue  # it is being ended for a rollout that waits
                await ready.sandbox.touch(LIFE_S)
            except SandboxLost:
                await ready.permits.release(ready.sandbox.identity)
                await self.forget(ready.sandbox.identity)
                continue
            except BaseException:  # no other code would find it again
                await asyncio.shield(ready.end())
                raise
            return ready.sandbox
        self._kept.pop(key, None)
        return None

    async def forget(self, identity: str) -> None:
        """The sandbox was killed, so delete the note in the store that says which rollout took
        it."""
        if MARK not in identity:
            return  # it was not booted ahead
        await self._store.delete(keys.claim(identity))

    async def _fill(
        self, key: str, provider: SandboxProvider, spec: SandboxSpec, permits: Permits
    ) -> None:
        try:
            while len(self._kept.get(key, ())) < self._each:
                async with self._one_at_a_time:
                    await self._make_room(key)
                    ready = await self._boot(key, provider, spec, permits)
                if ready is None:
                    return
                self._kept.setdefault(key, deque()).append(ready)
        except RateLimited:
            log.info("account full: no sandbox is booted ahead", provider=provider.name)
        except PerdureError as error:
            log.warning("cannot boot a ready sandbox", provider=provider.name, reason=str(error))
        finally:
            self._tasks.pop(key, None)

    async def _boot(
        self, key: str, provider: SandboxProvider, spec: SandboxSpec, permits: Permits
    ) -> _Ready | None:
        """None: the account has no free permit."""
        identity = f"p-{key}{MARK}{uuid4().hex[:12]}"
        labels = {**self._labels, "run": "ready", "rollout": owner(identity)}
        until = time.monotonic() + LIFE_S
        ours = replace(spec, labels={**labels, "purpose": "agent"}, ttl_s=LIFE_S)
        try:
            if not await permits.reserve(identity):
                return None
            ready = _Ready(await provider.create(ours, identity), until, permits)
        except RateLimited as error:
            await permits.refused(identity, error)
            raise
        except BaseException:  # a failed create may have left a sandbox, which its deadline ends
            await asyncio.shield(permits.release(identity))
            raise
        try:
            await permits.is_up(identity)
        except BaseException:
            await asyncio.shield(ready.end())
            raise
        return ready

    async def _make_room(self, key: str) -> None:
        """End those of the spec that was used least recently."""
        while sum(map(len, self._kept.values())) >= self._most:
            oldest = next((k for k, queue in self._kept.items() if queue and k != key), None)
            if oldest is None:
                return
            await self._end(self._kept.pop(oldest))

    async def _end(self, queue: deque[_Ready]) -> None:
        while queue:
            await queue.popleft().end()


def spec_key(provider: SandboxProvider, spec: SandboxSpec) -> str:
    """Digest of all fields in which sandboxes differ, without owner and deadline."""
    parts = [
        *(provider.name, spec.workdir, str(spec.tree), spec.image, str(spec.gateway)),
        *(sorted(spec.env.items()), spec.limits.model_dump(mode="json"), spec.network.value),
        [[str(mount.source), mount.target, mount.writable] for mount in spec.mounts],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def owner(identity: str) -> str:
    """The `rollout` label of a sandbox that was booted ahead, and the holder of its permit."""
    return f"{OWNER}{identity}"


async def give_way(store: Store, provider: SandboxProvider, identity: str) -> bool:
    """End a ready sandbox, whichever worker keeps it. False: a rollout took it first."""
    claim = keys.claim(identity)
    if not await store.put_if_absent(claim, GIVEN_WAY):
        with contextlib.suppress(NotFound):
            if (await store.get(claim)).data != GIVEN_WAY:
                return False
    await provider.kill(identity)
    await store.delete(claim)
    return True


async def taken_by(store: Store, rollout: str, taking: str) -> str | None:
    """Identity of the ready sandbox that this rollout took, as the store has it under `taking`."""
    try:
        identity = (await store.get(taking)).data.decode()
    except NotFound:
        return None
    return identity if await owner_of(store, owner(identity)) == rollout else None


async def owner_of(store: Store, rollout: str) -> str | None:
    """The rollout that took the sandbox with this `rollout` label; None: no rollout has yet."""
    try:
        stored = await store.get(keys.claim(rollout.removeprefix(OWNER)))
    except NotFound:
        return None
    return stored.data.decode()
