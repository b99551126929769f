"""What providers of sandboxes on other hosts share: scopes, cancelled creates, and checks of a
spec.

Several deployments may share one account of a service. A *scope* says which one owns a sandbox.
"""

import asyncio
import contextlib
import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar
from uuid import uuid4

import structlog

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    OutcomeUnknown,
    PerdureError,
    RateLimited,
)
from perdure.sandboxes import images
from perdure.sandboxes.base import Sandbox, SandboxInfo, SandboxProvider, SandboxSpec
from perdure.sandboxes.checks import check_identity
from perdure.sandboxes.guest.interpreters import with_interpreters
from perdure.sandboxes.guest.retries import Silences, again
from perdure.settings.tree import Settings

REQUEST_S = 60.0
CALLED_OFF_S = 5.0
"""Seconds that a cancelled create may take to end. After that its outcome is unknown."""

T = TypeVar("T")

log = structlog.get_logger()


class ServiceProvider(SandboxProvider):
    runs_images = True
    request_s = REQUEST_S
    """How long one call may take."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.home.absolute() / self.name
        self.silences = Silences()
        self._key_works = False

    @property
    @abstractmethod
    def _named_scope(self) -> str:
        """The deployment's name, if the settings give one: several hosts may share it."""

    @abstractmethod
    async def _create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        """As `create`. It is cancelled only CALLED_OFF_S seconds after the caller was cancelled."""

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        check_identity(identity)
        image, mounts = (
            images.prebuilt(self.name, spec.image, self.settings.sandbox.image_map),
            with_interpreters(spec.mounts),
        )
        spec = replace(spec, image=image, mounts=mounts)
        self._check_spec(spec)
        making = asyncio.create_task(self._create(spec, identity))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            ending = asyncio.create_task(self._call_off(making, identity))
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)
            raise

    async def _call_off(self, making: asyncio.Task[Sandbox], identity: str) -> None:
        """Kill what the create may have made. If it appears later, it has its identity, labels and
        deadline: the next try adopts it, or the reaper kills it."""
        await asyncio.wait([making], timeout=CALLED_OFF_S)
        making.cancel()
        try:
            async with asyncio.timeout(CALLED_OFF_S):
                await asyncio.gather(making, return_exceptions=True)
                await self.kill(identity)
        except (PerdureError, TimeoutError) as error:
            log.warning(
                "cannot kill a sandbox; the reaper will", identity=identity, reason=str(error)
            )

    async def list(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        return [] if self._is_unused else await self._list(labels or {})

    @property
    def _is_unused(self) -> bool:
        """This host never made a sandbox here, so there is nothing to sweep."""
        return not self.root.exists() and not self._named_scope

    @abstractmethod
    async def _list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """As `list`, for a service that may have sandboxes of ours."""

    async def _make_by(self, ask: Callable[[], Awaitable[T]], identity: str) -> T:
        """Call `ask` until it has made the sandbox or its failure is not transient.

        Raises: RateLimited; OutcomeUnknown when the answer to a create may have been lost.
        """
        try:
            return await again(ask, wait_at_caps=self.waits_at_caps)
        except RateLimited:
            raise
        except ControlPlaneError as error:
            raise OutcomeUnknown(f"{error}; it is looked up by identity {identity!r}") from error

    def _check_spec(self, spec: SandboxSpec) -> None:
        if spec.gateway is not None:
            raise ConfigurationError(
                f"gateway: a sandbox of {self.name} cannot see a socket of this host; reach the "
                "gateway by a relay"
            )
        for mount in spec.mounts:
            if mount.writable:
                raise ConfigurationError(
                    f"mounts: {mount.target!r} is writable, and nothing a sandbox of {self.name} "
                    "writes comes back to this host; use --sandbox bubblewrap for this"
                )
            if not mount.source.exists():
                raise ConfigurationError(f"mount source {str(mount.source)!r} does not exist")
        if spec.tree is not None and not spec.tree.is_dir():
            raise ConfigurationError(f"tree {str(spec.tree)!r} is not a folder")

    @property
    def _scope(self) -> str:
        """The deployment. Sandboxes of others are never adopted, listed or killed."""
        if self._named_scope:
            return self._named_scope
        path = self.root / "scope"
        if not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            draft = self.root / f".{uuid4().hex}"
            draft.write_text(uuid4().hex[:16])
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return path.read_text()
