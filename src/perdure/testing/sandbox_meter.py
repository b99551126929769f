"""Counts the sandboxes that a check creates and the seconds that they live."""

import time
from collections.abc import Mapping, Sequence

from perdure.errors import ConfigurationError, NotFound, RateLimited, SandboxLost
from perdure.sandboxes.base import Sandbox, SandboxInfo, SandboxProvider, SandboxSpec


class MeteredProvider(SandboxProvider):
    """Wraps a provider and counts its sandboxes. It refuses to create more than `most`.

    A sandbox that ends by itself counts until `kill` or a failed `attach`, so `seconds` is never
    too low.
    """

    def __init__(self, inner: SandboxProvider, most: int) -> None:
        self.inner, self.most = inner, most
        self.name, self.isolated, self.host_bound = inner.name, inner.isolated, inner.host_bound
        self.limits, self.networks = inner.limits, inner.networks
        self.created = 0
        self._ended_s = 0.0
        self._began: dict[str, float] = {}

    @property
    def sees_host(self) -> bool:
        return self.inner.sees_host

    @property
    def seconds(self) -> float:
        """Of all sandboxes together."""
        now = time.monotonic()
        return self._ended_s + sum(now - began for began in self._began.values())

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        is_new = identity not in self._began
        if is_new:
            if self.created >= self.most:
                raise ConfigurationError(f"a check may create at most {self.most} sandboxes")
            self.created += 1
            self._began[identity] = time.monotonic()
        try:
            return await self.inner.create(spec, identity)
        except RateLimited:
            if is_new:  # nothing was made
                self.created -= 1
                del self._began[identity]
            raise

    async def attach(self, identity: str) -> Sandbox:
        try:
            return await self.inner.attach(identity)
        except (NotFound, SandboxLost):
            self._end(identity)
            raise

    async def list(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        return await self.inner.list(labels)

    async def kill(self, identity: str) -> None:
        await self.inner.kill(identity)
        self._end(identity)

    def _end(self, identity: str) -> None:
        if (began := self._began.pop(identity, None)) is not None:
            self._ended_s += time.monotonic() - began

    def check(self) -> Sequence[str]:
        return self.inner.check()
