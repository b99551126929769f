"""What providers of sandboxes on other hosts share: scopes, cancelled creates, checks of a spec, and
calls through a service's SDK.

Several deployments may share one account of a service. A *scope* says which one owns a sandbox.
"""

import asyncio
import contextlib
import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import ClassVar, TypeVar
from uuid import uuid4

import structlog

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    OutcomeUnknown,
    PerdureError,
    RateLimited,
)
from perdure.installation import command_for_extra
from perdure.sandboxes import image_names
from perdure.sandboxes.base import Network, Sandbox, SandboxInfo, SandboxProvider, SandboxSpec
from perdure.sandboxes.guest.base_python import with_interpreters
from perdure.sandboxes.guest.guest_sandbox import GuestSandbox
from perdure.sandboxes.guest.service_retries import (
    Conflict,
    Missing,
    Silences,
    cancellable,
    retry_transient,
    sandbox_lost_error,
    was_refused,
)
from perdure.sandboxes.spec_validation import check_identity, check_sidecars
from perdure.settings import process_environment
from perdure.settings.settings_tree import Settings
from perdure.types.allowed_hosts import allowed_host

OWN = "perdure_"
"""Prefix of the labels that Perdure itself gives a sandbox."""
REQUEST_S = 60.0
CANCEL_GRACE_S = 5.0
"""Seconds that a cancelled create may take to end. After that its outcome is unknown."""

T = TypeVar("T")

log = structlog.get_logger()


class ServiceProvider(SandboxProvider):
    runs_images = True
    request_s = REQUEST_S
    """Seconds that one call may take."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.home.absolute() / self.name
        self.silences = Silences()
        self._key_works = False

    def image_used_for(self, image: str) -> str:
        return image_names.prebuilt(self.name, image, self.settings.sandbox.image_map)

    def _missing_package(self, package: str) -> list[str]:
        """The line for `check` if the package is not installed."""
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return [f"the {package} package is missing: {command_for_extra(self.name)}"]
        return []

    @property
    @abstractmethod
    def _named_scope(self) -> str:
        """The deployment's name, if the settings give one: several hosts may share it."""

    @abstractmethod
    async def _create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        """As `create`. It is cancelled only CANCEL_GRACE_S seconds after the caller was cancelled."""

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        check_identity(identity)
        image = None if spec.image is None else self.image_used_for(spec.image)
        spec = replace(spec, image=image, mounts=with_interpreters(spec.mounts))
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
        """Kill the sandbox that the create may have made. One that appears later has its identity,
        labels and deadline: the next activity attempt adopts it, or the reaper kills it."""
        await asyncio.wait([making], timeout=CANCEL_GRACE_S)
        making.cancel()
        try:
            async with asyncio.timeout(CANCEL_GRACE_S):
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
        """This host never created a sandbox at this service, so there is nothing to sweep."""
        return not self.root.exists() and not self._named_scope

    @abstractmethod
    async def _list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """As `list`, for a service that may have sandboxes of ours."""

    async def _make_by(self, ask: Callable[[], Awaitable[T]], identity: str) -> T:
        """Call `ask` until it has made the sandbox or its failure is not transient.

        Raises: RateLimited; OutcomeUnknown when the answer to a create may have been lost.
        """
        try:
            return await retry_transient(ask, wait_at_caps=self.waits_at_caps)
        except RateLimited:
            raise
        except ControlPlaneError as error:
            raise OutcomeUnknown(f"{error}; a retry looks for identity {identity!r}") from error

    def _check_spec(self, spec: SandboxSpec) -> None:
        check_sidecars(self, spec.sidecars)
        if spec.network is Network.LISTED and (why := self.no_list(spec.allowed_hosts)):
            raise ConfigurationError(f"{self.name} cannot use this list of hosts: {why}")
        if spec.gateway is not None:
            raise ConfigurationError(
                f"gateway: a sandbox of {self.name} cannot open a socket of this host; set "
                "PERDURE_GATEWAY__REACH=stdio"
            )
        for mount in spec.mounts:
            if mount.writable:
                raise ConfigurationError(
                    f"mounts: {mount.target!r} is writable, but what a sandbox of {self.name} "
                    "writes does not return to this host; use --sandbox bubblewrap"
                )
            if not mount.source.exists():
                raise ConfigurationError(f"mount source {str(mount.source)!r} does not exist")
        if spec.tree is not None and not spec.tree.is_dir():
            raise ConfigurationError(f"tree {str(spec.tree)!r} is not a folder")

    @property
    def _scope(self) -> str:
        """The deployment's scope. Sandboxes of other scopes are never adopted, listed or killed."""
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


class SdkProvider(ServiceProvider):
    """A service with accounts, called through its SDK."""

    networks = frozenset(Network)
    account_variables: ClassVar[Sequence[str]]
    """Environment variables that identify the account."""

    def no_list(self, hosts: Sequence[str]) -> str:
        for entry in map(allowed_host, hosts):
            if entry.port is not None:
                return f"its service limits no ports: write {replace(entry, port=None)}"
            if entry.addresses is not None and entry.addresses.version == 6:
                return f"its service takes IPv4 addresses only: leave {entry} out"
        return ""

    @property
    def account(self) -> str:
        whose = "\n".join(process_environment.foreign(name) for name in self.account_variables)
        return f"{self.name}-{hashlib.sha256(whose.encode()).hexdigest()[:8]}"

    @property
    def _is_unused(self) -> bool:
        return bool(self.check()) and not self.root.exists()

    @staticmethod
    @abstractmethod
    def typed(error: Exception, what: str, *, key_works: bool) -> PerdureError:
        """The SDK's error as one of ours. `key_works`: the service accepted the API key before."""

    async def _once(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            done = await cancellable(call)
        except Exception as error:
            raise self.typed(error, what, key_works=self._key_works) from error
        self._key_works = True
        return done

    async def _call(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        *,
        transient: type[Conflict | Missing] | tuple[()] = (),
    ) -> T:
        """Repeat while the failure is transient. `transient`: a refusal that counts as transient. For
        example, a list cannot be missing: a proxy answered 404."""

        async def once() -> T:
            try:
                return await self._once(what, call)
            except transient as error:
                raise ControlPlaneError(str(error)) from error

        return await retry_transient(once)

    def _labels(self, spec: SandboxSpec, identity: str) -> dict[str, str]:
        return {
            **spec.labels,
            f"{OWN}scope": self._scope,
            f"{OWN}identity": identity,
            f"{OWN}workdir": spec.workdir,
        }

    def _refuse_other_spec(
        self, identity: str, found: Mapping[str, str], wanted: Mapping[str, str]
    ) -> None:
        """Compare the labels of a sandbox with those of the spec. Raises: ConfigurationError."""
        if found.get(f"{OWN}spec") != wanted[f"{OWN}spec"]:
            raise ConfigurationError(
                f"{self.name} sandbox {identity!r} exists with another image, folder, network, "
                "limits or GPU; use a new generation"
            )


@dataclass(frozen=True)
class ServiceList:
    """A list of hosts as the services' SDKs take it."""

    names: tuple[str, ...]
    """Names and wildcards."""
    addresses: tuple[str, ...]
    """CIDRs, also of a single address."""

    @classmethod
    def of(cls, hosts: Sequence[str]) -> "ServiceList":
        entries = [allowed_host(entry) for entry in hosts]
        return cls(
            tuple(str(entry) for entry in entries if entry.addresses is None),
            tuple(str(entry.addresses) for entry in entries if entry.addresses is not None),
        )


def spec_digest(spec: SandboxSpec, *more: str | None) -> str:
    """Digest of what cannot change after the create, for the label `spec`. `more`: what the service
    boots, such as the names of image and GPU."""
    limits = spec.limits.model_dump(exclude={"gpu"})
    fixed = [spec.workdir, *more, str(spec.network), *spec.allowed_hosts, limits]
    return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:32]


class SdkSandbox(GuestSandbox):
    room = 16 << 20

    def __init__(
        self, provider: SdkProvider, sdk_id: str, identity: str, labels: Mapping[str, str]
    ) -> None:
        workdir = labels.get(f"{OWN}workdir", "/")
        super().__init__(identity, workdir, packs=provider.root / "packs")
        self.provider, self._id = provider, sdk_id
        self.has_answered = False

    async def kill(self) -> None:
        await self.provider.kill(self.identity)

    @abstractmethod
    async def _is_there(self, error: Exception, found: PerdureError, *, in_sandbox: bool) -> bool:
        """Whether the sandbox is alive after a call failed with `error`, which we read as `found`.

        Raises: SandboxLost.
        """

    async def _call(
        self, what: str, call: Callable[[], Awaitable[T]], *, in_sandbox: bool = True
    ) -> T:
        return await retry_transient(lambda: self._once(what, call, in_sandbox=in_sandbox))

    async def _once(
        self, what: str, call: Callable[[], Awaitable[T]], *, in_sandbox: bool = True
    ) -> T:
        """Raises SandboxLost only if the control plane confirms it, because proxies may be wrong,
        or after a long silence.

        `in_sandbox`: the sandbox answers this call, rather than the service.
        """
        try:
            done = await cancellable(call)
        except Exception as error:
            found = self.provider.typed(error, what, key_works=True)
            if was_refused(found):
                raise found from error
            if isinstance(found, Missing | Conflict | ControlPlaneError):
                if not await self._is_there(error, found, in_sandbox=in_sandbox):
                    raise sandbox_lost_error(self.provider.name, self.identity) from error
                if not isinstance(found, ControlPlaneError):
                    raise ControlPlaneError(str(found)) from error
            raise found from error
        if in_sandbox:
            self.has_answered = True
            self.provider.silences.broken(self._id)
        return done
