"""Sandboxes booted ahead of the rollouts that will want them: bounded, short-lived, used once.

A worker keeps them for the specs it has booted lately and hands each to one rollout at most. What a
killed worker leaves ends at its own deadline; who took one is in the store, for the reaper.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

import structlog

from perdure.errors import NotFound, PerdureError, RateLimited, SandboxLost
from perdure.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from perdure.settings import Settings
from perdure.storage import keys
from perdure.storage.base import Store

log = structlog.get_logger("perdure.ready")

LIFE_S = 600.0
"""A ready sandbox that nobody takes ends after so long, by its provider or the reaper."""
LEAST_LEFT_S = 60.0
MARK = "-ready-"
OWNER = "ready/"
"""Begins the `rollout` label of a sandbox that was booted for nobody yet."""


@dataclass(frozen=True)
class _Ready:
    sandbox: Sandbox
    until: float


class ReadySandboxes:
    """The ready sandboxes of one worker process: up to `ready_sandboxes` a spec, and in all."""

    def __init__(self, settings: Settings, store: Store, labels: Mapping[str, str]) -> None:
        self._most = settings.ready_sandboxes_total
        self._each = min(settings.ready_sandboxes, self._most)
        self._ttl_s = settings.sandbox_ttl_s
        self._store = store
        self._labels = labels
        self._shelves: dict[str, deque[_Ready]] = {}
        """By spec, the one used last at the end."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def take(
        self, provider: SandboxProvider, spec: SandboxSpec, rollout: str
    ) -> Sandbox | None:
        """A sandbox of this spec that nobody has used, now this rollout's; None: boot one.

        More like it are made in the background either way.
        """
        if not self._each:
            return None
        key = spec_key(provider, spec)
        found = await self._take(key, rollout)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._fill(key, provider, spec))
        return found

    async def filled(self) -> None:
        """Wait until nothing is being booted ahead."""
        await asyncio.gather(*self._tasks.values())

    async def close(self) -> None:
        """None is left."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for shelf in self._shelves.values():
            await self._end(shelf)

    async def _take(self, key: str, rollout: str) -> Sandbox | None:
        shelf = self._shelves.pop(key, deque())
        self._shelves[key] = shelf
        while shelf:
            ready = shelf.popleft()
            if ready.until - time.time() < LEAST_LEFT_S:
                continue  # its deadline ends it
            try:
                await self._store.put_if_absent(
                    keys.claim(ready.sandbox.identity), rollout.encode()
                )
                await ready.sandbox.touch(self._ttl_s)
            except SandboxLost:
                await self.forget(ready.sandbox.identity)
                continue
            except BaseException:  # nobody else will ever find it
                await asyncio.shield(ready.sandbox.kill())
                raise
            return ready.sandbox
        self._shelves.pop(key, None)
        return None

    async def forget(self, identity: str) -> None:
        """It is killed: nobody need know any more who took it."""
        if MARK not in identity:
            return  # it was booted for its rollout
        await self._store.delete(keys.claim(identity))

    async def _fill(self, key: str, provider: SandboxProvider, spec: SandboxSpec) -> None:
        try:
            while len(self._shelves.get(key, ())) < self._each:
                async with self._one_at_a_time:
                    await self._make_room(key)
                    ready = await self._boot(key, provider, spec)
                self._shelves.setdefault(key, deque()).append(ready)
        except RateLimited:
            log.info("account full: no sandbox is booted ahead", provider=provider.name)
        except PerdureError as error:
            log.warning("no ready sandbox", provider=provider.name, reason=str(error))
        finally:
            self._tasks.pop(key, None)

    async def _boot(self, key: str, provider: SandboxProvider, spec: SandboxSpec) -> _Ready:
        identity = f"p-{key}{MARK}{uuid4().hex[:12]}"
        labels = {**self._labels, "run": "ready", "rollout": f"{OWNER}{identity}"}
        until = time.time() + LIFE_S
        ours = replace(spec, labels={**labels, "purpose": "agent"}, ttl_s=LIFE_S)
        return _Ready(await provider.create(ours, identity), until)

    async def _make_room(self, key: str) -> None:
        """The spec that was not asked for longest gives way."""
        while sum(map(len, self._shelves.values())) >= self._most:
            oldest = next((k for k, shelf in self._shelves.items() if shelf and k != key), None)
            if oldest is None:
                return
            await self._end(self._shelves.pop(oldest))

    async def _end(self, shelf: deque[_Ready]) -> None:
        while shelf:
            with contextlib.suppress(PerdureError):
                await shelf.popleft().sandbox.kill()


def spec_key(provider: SandboxProvider, spec: SandboxSpec) -> str:
    """Digest of all that makes one sandbox differ from another, but whose it is and until when."""
    parts = [
        *(provider.name, spec.workdir, str(spec.tree), spec.image, str(spec.gateway)),
        *(sorted(spec.env.items()), spec.limits.model_dump(mode="json"), spec.network.value),
        [[str(mount.source), mount.target, mount.writable] for mount in spec.mounts],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


async def owner_of(store: Store, rollout: str) -> str | None:
    """Who took the sandbox with this `rollout` label; None while it stands ready."""
    try:
        stored = await store.get(keys.claim(rollout.removeprefix(OWNER)))
    except NotFound:
        return None
    return stored.data.decode()
