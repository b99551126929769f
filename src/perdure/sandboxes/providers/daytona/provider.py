"""The `daytona` provider: sandboxes of Daytona or a compatible service, through its SDK.

The identity is part of the sandbox's name, so a second create finds the first sandbox. The guest
program runs commands and keeps their records. The service's exit codes are only hints.
"""

import asyncio
import contextlib
import functools
import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    NotFound,
    PerdureError,
    RateLimited,
)
from perdure.sandboxes.base import Network, Sandbox, SandboxInfo, SandboxSpec
from perdure.sandboxes.guest.guest_sandbox import MARK
from perdure.sandboxes.guest.service_image_builds import (
    ServiceBuild,
    ServiceImageBuilder,
    with_size,
)
from perdure.sandboxes.guest.service_provider import OWN, SdkSandbox, ServiceList, spec_digest
from perdure.sandboxes.guest.service_retries import (
    Conflict,
    Missing,
    recheck_missing,
    sandbox_lost_error,
)
from perdure.sandboxes.image_builds import ImageBuild
from perdure.sandboxes.providers.daytona import daytona_image_builds
from perdure.sandboxes.providers.daytona.daytona_client import client, unread_file
from perdure.sandboxes.providers.daytona.daytona_errors import typed
from perdure.sandboxes.spec_validation import check_identity
from perdure.settings import process_environment
from perdure.types import AccountCaps, Limits

if TYPE_CHECKING:
    from daytona import AsyncSandbox

UPLOAD_BYTES_PER_S = 1_000_000
"""Speed of the slowest link on which an upload does not time out."""
QUEUE_MINUTES = 5
"""Minutes that the service may look for a machine to run a sandbox on."""
LOOK_S = 0.2
GONE = frozenset({"destroying", "destroyed"})
ENDED = frozenset(
    {
        "archived", "archiving", "build_failed", "error", "paused", "pausing", "snapshotting",
        "stopped", "stopping",
    }
)  # fmt: skip
"""States from which our sandboxes do not come back: only the service stops one."""
PATIENCE_S = {"pulling_snapshot": 300.0, "building_snapshot": 900.0, "pending_build": 900.0}
"""State -> seconds that a boot may stay in it without a change of `updatedAt`."""
STARTING_S = 60.0
"""The same for all other states."""
BOOT_S = 1800.0
SILENT_S = 180.0
"""Seconds of 502 answers after which the daemon of a started sandbox counts as dead."""
IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*")
SNAPSHOT = "snapshot:"
"""Prefix of an `environment.image` that names a snapshot of the account instead of an image."""


class DaytonaSandbox(SdkSandbox):
    service = "Daytona"
    provider: "DaytonaProvider"

    def __init__(self, provider: "DaytonaProvider", sdk: "AsyncSandbox", identity: str) -> None:
        super().__init__(provider, sdk.id, identity, sdk.labels)
        self.sdk = sdk

    async def touch(self, ttl_s: float) -> None:
        """Set the deadline and the idle timer. Our calls reset that timer; processes do not."""
        minutes = _minutes(ttl_s)
        await self._call("set_ttl", lambda: self.sdk.set_ttl(minutes, self.provider.request_s))
        if (self.sdk.auto_stop_interval or 0) < minutes:
            await self._call(
                "set_autostop",
                lambda: self.sdk.set_autostop_interval(minutes, self.provider.request_s),
            )
            self.sdk.auto_stop_interval = minutes
        await self._call("refresh", lambda: self.sdk.refresh_activity(self.provider.request_s))

    async def _print(self, what: str, command: str, extra_s: float) -> str:
        seconds = self.provider.request_s + extra_s

        async def run() -> str:
            async with asyncio.timeout(seconds):
                done = await self.sdk.process.exec(command, cwd="/", timeout=math.ceil(seconds))
            said = str(done.result)
            if done.exit_code == 127 and MARK not in said:
                blame = ConfigurationError(
                    f"the image of sandbox {self.identity!r} lacks python3 or a shell tool: "
                    f"{said[-300:]}"
                )
                raise self._lacking(blame)
            return said

        return await self._once(what, run)

    async def _write(self, path: str, data: bytes | Path) -> None:
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        seconds = math.ceil(self.provider.request_s + size / UPLOAD_BYTES_PER_S)

        async def write() -> None:
            async with asyncio.timeout(seconds):
                if isinstance(data, bytes):
                    await self.sdk.fs.upload_file(data, path, seconds)
                else:
                    await self.sdk.fs.upload_file(str(data), path, seconds)

        await self._once("upload", write)

    async def _is_there(self, error: Exception, found: PerdureError, *, in_sandbox: bool) -> bool:
        return await self.provider.lives(self.sdk.id, silent=_is_silence(error))


class DaytonaProvider(ServiceImageBuilder):
    """`DAYTONA_API_KEY` and the SDK's other variables name the account. `PERDURE_DAYTONA__SCOPE`
    names the deployment, if several hosts share one or several share an account."""

    name = "daytona"
    limits = frozenset({"output_mb"})  # the snapshot sets the others
    fixed_by_image = frozenset({"cpus", "memory_mb", "disk_mb"})
    account_caps = AccountCaps(creates_per_s=5, starting=32)
    """What the smallest account allows. Refusals show its quota."""
    account_variables = ("DAYTONA_API_URL", "DAYTONA_ORGANIZATION_ID", "DAYTONA_API_KEY")
    typed = staticmethod(typed)

    @property
    def _named_scope(self) -> str:
        return self.settings.daytona.scope

    def check(self) -> Sequence[str]:
        missing = self._missing_package("daytona")
        token = process_environment.foreign("DAYTONA_JWT_TOKEN") and process_environment.foreign(
            "DAYTONA_ORGANIZATION_ID"
        )
        if not process_environment.foreign("DAYTONA_API_KEY") and not token:
            missing.append("DAYTONA_API_KEY is not set; make a key at https://app.daytona.io")
        elif surprise := unread_file(Path.cwd()):
            missing.append(surprise)
        return missing

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        sdk = await self._find(identity, expected=True)
        if sdk is None:
            raise NotFound(f"no daytona sandbox {identity!r}")
        return DaytonaSandbox(self, await self._started(sdk, identity), identity)

    async def _list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        from daytona import ListSandboxesQuery

        query = ListSandboxesQuery(labels={**labels, f"{OWN}scope": self._scope})

        async def found() -> Sequence[Any]:
            service, seconds = await client(), self.request_s
            return [sdk async for sdk in service.list(query, request_timeout=seconds)]

        return [
            SandboxInfo(
                identity=sdk.labels[f"{OWN}identity"],
                provider=self.name,
                alive=_state(sdk) not in ENDED,
                created=_time(sdk.created_at) or 0.0,
                # the service's clock decides: a sandbox that it lists has not expired
                expires=max(_time(sdk.auto_destroy_at) or math.inf, time.time() + 1),
                labels={
                    name: value
                    for name, value in sdk.labels.items()
                    if not name.startswith(OWN) and name != "code-toolbox-language"
                },
            )
            for sdk in await self._call("list", found, transient=Missing)
            if _state(sdk) not in GONE
        ]

    async def kill(self, identity: str) -> None:
        check_identity(identity)

        async def end() -> None:
            sdk = await self._look(self._name(identity))
            if _state(sdk) not in GONE:
                await sdk.delete(timeout=self.request_s)

        with contextlib.suppress(Missing):
            await self._call("delete", end, transient=Conflict)

    # -- making -----------------------------------------------------------------------------------

    async def _create(self, spec: SandboxSpec, identity: str) -> DaytonaSandbox:
        """Make or adopt it. A boot that makes no progress is deleted, and its identity is lost."""
        own = self._labels(spec, identity)
        sdk = await self._find(identity) or await self._make(spec, identity, own)
        self._refuse_other_spec(identity, sdk.labels, own)
        box = DaytonaSandbox(self, await self._started(sdk, identity), identity)
        await box.set_up(spec)
        return box

    async def _make(
        self, spec: SandboxSpec, identity: str, own: Mapping[str, str]
    ) -> "AsyncSandbox":
        """Create it. After a lost answer, a read by name shows whether it was created."""

        async def ask() -> "AsyncSandbox":
            try:
                return await self._ask(spec, identity, own)
            except RateLimited:
                raise  # nothing was made; if something was, the next create gets a Conflict
            except (Conflict, ControlPlaneError) as error:
                if (found := await self._find(identity)) is not None:
                    return found
                if isinstance(error, Conflict):  # one of this name is being deleted
                    raise ControlPlaneError(str(error)) from error
                raise

        return await self._make_by(ask, identity)

    async def _ask(
        self, spec: SandboxSpec, identity: str, own: Mapping[str, str]
    ) -> "AsyncSandbox":
        if built := self._built_image(spec):
            spec = replace(spec, image=f"{SNAPSHOT}{self._image_id(built)}")
        params = _params(spec, self.settings.daytona.snapshot)
        params.name, params.labels = self._name(identity), dict(own)

        async def create() -> "AsyncSandbox":
            service = await client()
            return await service.create(params, timeout=self.request_s)

        try:
            return await self._once("create", create)
        except (Missing, ConfigurationError) as error:
            if built and f"Snapshot {daytona_image_builds.snapshot_name(built)}" in str(error):
                self._forget(built)  # it was deleted, or is inactive
                raise self._not_built(built) from error
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"{error}; name an image or snapshot that exists in environment.image or "
                "PERDURE_DAYTONA__SNAPSHOT"
            ) from error

    async def _started(self, sdk: "AsyncSandbox", identity: str) -> "AsyncSandbox":
        """Wait until it has started.

        Raises: SandboxLost when it ended, failed or makes no progress. Then it is also deleted.
        """
        began = moved = time.monotonic()
        seen = ("", "")
        while (state := _state(sdk)) != "started":
            now = time.monotonic()
            if (state, sdk.updated_at or "") != seen:
                seen, moved = (state, sdk.updated_at or ""), now
            stuck = now - moved > PATIENCE_S.get(state, STARTING_S) or now - began > BOOT_S
            if stuck or state in ENDED:
                with contextlib.suppress(PerdureError):
                    # if the service refuses, the reaper deletes it
                    await self.kill(identity)
                why = f"it made no progress in {state}" if stuck else f"{state}: {sdk.error_reason}"
                raise sandbox_lost_error(self.name, identity, f"({why})")
            await asyncio.sleep(LOOK_S)
            found = await self._find(identity)
            if found is None:
                raise sandbox_lost_error(self.name, identity)
            sdk = found
        return sdk

    def _labels(self, spec: SandboxSpec, identity: str) -> dict[str, str]:
        return {**super()._labels(spec, identity), f"{OWN}spec": spec_digest(spec, spec.image)}

    def _name(self, identity: str) -> str:
        """Unique in the account, which several deployments may share."""
        return f"{identity}-{hashlib.sha256(self._scope.encode()).hexdigest()[:8]}"

    def _check_spec(self, spec: SandboxSpec) -> None:
        super()._check_spec(spec)
        if spec.image and not IMAGE.fullmatch(spec.image.removeprefix(SNAPSHOT)):
            raise ConfigurationError(
                f"environment.image: {spec.image!r} is neither an image nor {SNAPSHOT}NAME"
            )

    # -- images -----------------------------------------------------------------------------------

    def sized_image(self, image: str, limits: Limits) -> str:
        return with_size(image, limits)

    async def _build(self, build: ImageBuild) -> ServiceBuild:
        call = functools.partial(self._call, transient=Missing)
        return await daytona_image_builds.run_build(build, call)

    async def _end_late_build(self, build: ImageBuild) -> str:
        if not await self._remove_snapshot(build.image):
            raise ControlPlaneError("Daytona: build: it was not accepted within the build's time")
        return "the snapshot of the build was deleted"

    async def remove_image(self, name: str) -> bool:
        await self._remove_snapshot(name)
        self._forget(name)
        return True

    async def _remove_snapshot(self, name: str) -> bool:
        snapshot = daytona_image_builds.snapshot_name(name)

        async def remove() -> bool:
            async with asyncio.timeout(self.request_s):
                return await daytona_image_builds.remove_snapshot(snapshot)

        return await self._call("delete snapshot", remove)

    # -- finding ----------------------------------------------------------------------------------

    async def _look(self, id_or_name: str) -> "AsyncSandbox":
        service = await client()
        return await service.get(id_or_name, request_timeout=self.request_s)

    async def _get(self, id_or_name: str) -> "AsyncSandbox":
        """Raises: Missing."""
        return await self._call("get", lambda: self._look(id_or_name))

    async def _find(self, identity: str, *, expected: bool = False) -> "AsyncSandbox | None":
        """Look it up by name. `expected`: it should exist, so one 404 is not enough.

        Raises: SandboxLost when it has ended and still has its name.
        """
        name = self._name(identity)
        try:
            sdk = await (recheck_missing(lambda: self._get(name)) if expected else self._get(name))
        except Missing:
            return None
        if sdk.queue_timed_out_at or sdk.spot_evicted_at:
            raise sandbox_lost_error(
                self.name, identity, "(the service found no machine for it, or evicted it)"
            )
        return None if _state(sdk) in GONE else sdk

    async def lives(self, sandbox_id: str, *, silent: bool) -> bool:
        """What the control plane says, except that a daemon `silent` for too long is dead."""
        try:
            sdk = await recheck_missing(lambda: self._get(sandbox_id))
        except Missing:
            return False
        if _state(sdk) in GONE | ENDED:
            return False
        if not silent:
            return True
        return self.silences.lasts(sandbox_id) < SILENT_S


def _params(spec: SandboxSpec, default_snapshot: str) -> Any:
    """The parameters of a create. A tree is uploaded into a snapshot; without one, the image is
    booted."""
    from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

    minutes = _minutes(spec.ttl_s)
    common: dict[str, Any] = {
        "os_user": "root",
        "auto_stop_interval": minutes,
        "auto_delete_interval": 0,
        "ttl_minutes": minutes,
        "queue_timeout": QUEUE_MINUTES,
        **_network(spec),
    }
    image = spec.image if spec.tree is None else None
    if image is None or image.startswith(SNAPSHOT):
        snapshot = (image or "").removeprefix(SNAPSHOT)
        snapshot = snapshot or default_snapshot
        return CreateSandboxFromSnapshotParams(snapshot=snapshot or None, **common)
    resources = daytona_image_builds.resources(spec.limits)
    return CreateSandboxFromImageParams(image=image, resources=resources, **common)


def _network(spec: SandboxSpec) -> dict[str, Any]:
    """Either list implies that all else is blocked."""
    if spec.network is not Network.LISTED:
        return {"network_block_all": spec.network is not Network.HOST}
    listed = ServiceList.of(spec.allowed_hosts)
    return {
        "network_allow_list": ",".join(listed.addresses) or None,
        "domain_allow_list": ",".join(listed.names) or None,
    }


def _minutes(seconds: float) -> int:
    return max(1, math.ceil(seconds / 60))


def _state(sdk: "AsyncSandbox") -> str:
    return sdk.state.value if sdk.state is not None else "unknown"


def _time(stamp: str | None) -> float | None:
    return datetime.fromisoformat(stamp).timestamp() if stamp else None


def _is_silence(error: Exception) -> bool:
    return getattr(error, "status_code", None) == 502
