"""The `e2b` provider: sandboxes of E2B or a compatible service, through its SDK.

The identity is the idempotency key of the create, and is in the metadata. The guest program runs
commands and keeps their records, so lost answers do no harm. Trees and mounts are uploaded.
"""

import asyncio
import contextlib
import functools
import importlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    NotFound,
    OutcomeUnknown,
    PerdureError,
    SandboxLost,
)
from perdure.sandboxes import image_names
from perdure.sandboxes.base import Network, Sandbox, SandboxInfo, SandboxSpec
from perdure.sandboxes.guest.service_image_builds import (
    ServiceBuild,
    ServiceImageBuilder,
    with_size,
)
from perdure.sandboxes.guest.service_provider import OWN, SdkSandbox, ServiceList
from perdure.sandboxes.guest.service_retries import (
    Conflict,
    Missing,
    recheck_missing,
    sandbox_lost_error,
)
from perdure.sandboxes.image_builds import ImageBuild
from perdure.sandboxes.providers.e2b import e2b_image_builds
from perdure.sandboxes.providers.e2b.e2b_errors import typed
from perdure.sandboxes.spec_validation import check_identity
from perdure.settings import process_environment
from perdure.types import AccountCaps, Limits

if TYPE_CHECKING:
    from e2b import AsyncSandbox, SandboxNetworkOpts

EVERYTHING = "0.0.0.0/0"
MOST_KEYS = 8
"""Idempotency keys to try for one identity: the key of a killed sandbox cannot be used again."""
LIST_LAG_S = 2.0
"""Seconds for which a new sandbox may be missing from the list."""
DAEMON_GONE_S = 60.0
"""If the proxy denies for this many seconds that the sandbox exists, or that its daemon listens,
the sandbox counts as dead, even if the service says it runs."""
UNREACHABLE_S = 600.0
"""The same if the sandbox does not answer and the reason is unknown."""
SILENT_S = 5.0
"""Seconds past a command's time limit until we stop waiting. The service should have ended it."""
TEMPLATE = re.compile(r"[a-z0-9][a-z0-9_-]*(?:/[a-z0-9][a-z0-9_-]*)?(?::[A-Za-z0-9._-]+)?")


class E2BSandbox(SdkSandbox):
    service = "E2B"
    provider: "E2BProvider"

    def __init__(
        self, provider: "E2BProvider", sdk: "AsyncSandbox", identity: str, own: Mapping[str, str]
    ) -> None:
        super().__init__(provider, sdk.sandbox_id, identity, own)
        self.sdk = sdk

    async def touch(self, ttl_s: float) -> None:
        await self._call(
            "set_timeout",
            lambda: self.sdk.set_timeout(math.ceil(ttl_s), **self.provider.options),
            in_sandbox=False,
        )

    async def _write(self, path: str, data: bytes | Path) -> None:
        async def write() -> None:
            options: Any = {"user": "root", "request_timeout": self.provider.request_s}
            if isinstance(data, bytes):
                await self.sdk.files.write(path, data, **options)
            else:
                with data.open("rb") as file:
                    await self.sdk.files.write(path, file, **options)

        await self._once("upload", write)

    async def _print(self, what: str, command: str, extra_s: float) -> str:
        seconds = self.provider.request_s + extra_s

        async def run() -> str:
            from e2b import CommandExitException

            try:
                async with asyncio.timeout(seconds + SILENT_S):
                    # a stream without data never ends by itself
                    done = await self.sdk.commands.run(
                        command, user="root", timeout=seconds, request_timeout=seconds, cwd="/"
                    )
            except CommandExitException as error:
                if error.exit_code == 127:
                    blame = ConfigurationError(
                        f"the template of sandbox {self.identity!r} lacks python3 or a shell tool: "
                        f"{error.stderr[-300:]}"
                    )
                    raise self._lacking(blame) from error
                return f"{error.stdout}\n{error.stderr[-300:]}"
            return done.stdout

        return await self._once(what, run)

    async def _is_there(self, error: Exception, found: PerdureError, *, in_sandbox: bool) -> bool:
        if not await self.provider.exists(self.sdk.sandbox_id):
            return False
        if in_sandbox:
            self._condemn_the_silent(found)
        return True

    def _condemn_the_silent(self, found: PerdureError) -> None:
        """Give up a sandbox that runs, according to its service. Raises: SandboxLost."""
        was_denied = isinstance(found, Missing) or "port is not open" in str(found)
        limit_s = DAEMON_GONE_S if was_denied else UNREACHABLE_S
        if self.provider.silences.lasts(self.sdk.sandbox_id) > limit_s:
            raise sandbox_lost_error(
                "e2b", self.identity, f"(it runs, but has not answered for {limit_s:g} s: {found})"
            )


class E2BProvider(ServiceImageBuilder):
    """`E2B_API_KEY` and the SDK's other variables name the account. `PERDURE_E2B__SCOPE` names the
    deployment, if several hosts share one or several share an account."""

    name = "e2b"
    limits = frozenset({"output_mb"})  # the template sets the others
    fixed_by_image = frozenset({"cpus", "memory_mb", "disk_mb"})
    account_caps = AccountCaps(creates_per_s=5, starting=16)
    """What a paid account allows. Refusals show how many live sandboxes it allows."""
    account_variables = ("E2B_API_KEY",)
    typed = staticmethod(typed)

    def _check_spec(self, spec: SandboxSpec) -> None:
        super()._check_spec(spec)
        if not TEMPLATE.fullmatch(self._template(spec)):
            raise ConfigurationError(
                f"environment.image: {spec.image!r} is not an E2B template; build one from the image "
                "(`e2b template build`) and name it there"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Options of every call. The SDK reads the key and the URLs from the environment."""
        return {"retries": 0, "request_timeout": self.request_s}

    @property
    def _named_scope(self) -> str:
        return self.settings.e2b.scope

    def check(self) -> Sequence[str]:
        missing = self._missing_package("e2b")
        if not process_environment.foreign("E2B_API_KEY"):
            missing.append("E2B_API_KEY is not set; make a key at https://e2b.dev/dashboard")
        return missing

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        box = await self._known(identity)
        for pause in (0.0, LIST_LAG_S / 2, LIST_LAG_S / 2):
            if box is None and (found := await self._find({f"{OWN}identity": identity})):
                box = await self._connect(found[0].sandbox_id, identity, found[0].metadata)
            if box is not None or not self._hint(identity).parent.exists():
                break
            await asyncio.sleep(pause)
        if box is None:
            raise NotFound(f"no e2b sandbox {identity!r}")
        return box

    async def _list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        return [
            SandboxInfo(
                identity=info.metadata[f"{OWN}identity"],
                provider=self.name,
                alive=info.state.value == "running",
                created=info.started_at.timestamp(),
                # the service's clock decides: what it calls running has not expired
                expires=max(info.end_at.timestamp(), time.time() + 1),
                labels={k: v for k, v in info.metadata.items() if not k.startswith(OWN)},
            )
            for info in await self._find(labels)
        ]

    async def kill(self, identity: str) -> None:
        check_identity(identity)
        hint = self._hint(identity)
        ids = {info.sandbox_id for info in await self._find({f"{OWN}identity": identity})}
        if (noted := _noted(hint)) is not None:
            ids.add(noted)
        for sandbox_id in ids:
            await self._kill(sandbox_id)
        hint.unlink(missing_ok=True)

    # -- making -----------------------------------------------------------------------------------

    async def _create(self, spec: SandboxSpec, identity: str) -> E2BSandbox:
        box = await self._known(identity)
        if box is None and (found := await self._find({f"{OWN}identity": identity})):
            box = await self._connect(found[0].sandbox_id, identity, found[0].metadata)
        if box is None:
            return await self._make(spec, identity)
        await box.set_up(spec)
        return box

    async def _make(self, spec: SandboxSpec, identity: str) -> E2BSandbox:
        """Create under the first usable key. Creators that race use the same keys in the same order."""
        own = self._labels(spec, identity)
        for number in range(MOST_KEYS):
            key = f"{self._scope}-{identity}-{number}"
            try:
                ask = functools.partial(self._ask, spec, own, key)
                sdk = await self._make_by(ask, identity)
            except Conflict:  # another request made it, or the service does not know its outcome
                await asyncio.sleep(LIST_LAG_S)
                if not (found := await self._find({f"{OWN}identity": identity})):
                    continue
                box = await self._connect(found[0].sandbox_id, identity, found[0].metadata)
                await box.set_up(spec)
                return box
            self._remember(identity, sdk.sandbox_id)
            box = E2BSandbox(self, sdk, identity, own)
            try:
                await box.set_up(spec)
            except SandboxLost:  # the key is a killed one's, or the new one is not visible yet
                if box.has_answered:
                    raise
                await self._kill(sdk.sandbox_id)
                self._hint(identity).unlink(missing_ok=True)
                continue
            return box
        raise OutcomeUnknown(
            f"e2b sandbox {identity!r} vanished {MOST_KEYS} times after its create"
        )

    async def _ask(self, spec: SandboxSpec, own: Mapping[str, str], key: str) -> "AsyncSandbox":
        sandboxes = await _sandboxes()
        template = self._template(spec)
        try:
            sdk = await self._once(
                "create",
                lambda: sandboxes.create(
                    template,
                    timeout=math.ceil(spec.ttl_s),
                    metadata=dict(own),
                    allow_internet_access=spec.network is Network.HOST,
                    network=_listed(spec),
                    lifecycle={"on_timeout": "kill"},
                    idempotency_key=key,
                    **self.options,
                ),
            )
        except Missing as error:
            if built := self._built_image(spec):
                self._forget(built)
                raise self._not_built(built) from error
            raise ConfigurationError(
                f"{error}; build the template {template!r}, or name another in environment.image "
                "or PERDURE_E2B__TEMPLATE"
            ) from error
        except Conflict as error:
            if "in_progress" in str(error) or "in progress" in str(error):
                raise ControlPlaneError(str(error)) from error
            raise
        return sdk

    def _template(self, spec: SandboxSpec) -> str:
        """The template to boot. A tree is uploaded into the default one. Without a tree it is the
        image, unless routing tags already name the image."""
        if built := self._built_image(spec):
            return self._image_id(built)
        if spec.tree is None and spec.image is not None and not self._routing_tags(spec.image):
            return spec.image
        return self.settings.e2b.template

    def _routing_tags(self, image: str | None) -> dict[str, str]:
        e2b = self.settings.e2b
        return image_names.routing_tags(image, e2b.metadata_file, e2b.metadata_image_key)

    def _labels(self, spec: SandboxSpec, identity: str) -> dict[str, str]:
        return {**self._routing_tags(spec.image), **super()._labels(spec, identity)}

    # -- images -----------------------------------------------------------------------------------

    def sized_image(self, image: str, limits: Limits) -> str:
        return with_size(image, limits)

    async def _build(self, build: ImageBuild) -> ServiceBuild:
        await _sandboxes()
        call = functools.partial(self._call, transient=Missing)
        return await e2b_image_builds.run_build(build, call, self.options)

    async def _end_late_build(self, build: ImageBuild) -> str:
        await self.remove_image(build.image)
        return "the template of the build was deleted"

    async def remove_image(self, name: str) -> bool:
        await _sandboxes()
        template = e2b_image_builds.template_name(name)

        async def remove() -> bool:
            return await e2b_image_builds.remove_template(template, self.options)

        if not await self._call("delete template", remove, transient=Missing):
            return False
        self._forget(name)
        return True

    # -- finding ----------------------------------------------------------------------------------

    async def _find(self, wanted: Mapping[str, str]) -> "Sequence[Any]":
        """Our sandboxes, oldest first: if two have one identity, every caller uses the same one."""
        sandboxes = await _sandboxes()
        from e2b import SandboxQuery

        query = SandboxQuery(metadata={**wanted, f"{OWN}scope": self._scope})

        async def page(token: str | None) -> tuple[Sequence[Any], str | None]:
            pages = sandboxes.list(query, next_token=token, **self.options)
            return await pages.next_items(), pages.next_token

        found: list[Any] = []
        token: str | None = None
        while True:
            ask = functools.partial(page, token)
            items, token = await self._call("list", ask, transient=Missing)
            found += items
            if not token:
                return sorted(found, key=lambda info: (info.started_at, info.sandbox_id))

    async def exists(self, sandbox_id: str) -> bool:
        try:
            await self._info(sandbox_id)
        except Missing:
            return False
        return True

    async def _info(self, sandbox_id: str) -> Any:
        """Raises: Missing."""
        sandboxes = await _sandboxes()

        async def info() -> Any:
            return await sandboxes.get_info(sandbox_id, **self.options)

        return await recheck_missing(lambda: self._call("get_info", info))

    async def _known(self, identity: str) -> E2BSandbox | None:
        """This host's sandbox, even if the list does not show it yet. Raises: SandboxLost."""
        sandbox_id = _noted(self._hint(identity))
        if sandbox_id is None:
            return None
        try:
            info = await self._info(sandbox_id)
            return await self._connect(sandbox_id, identity, info.metadata)
        except Missing:
            raise sandbox_lost_error(self.name, identity) from None

    async def _connect(self, sandbox_id: str, identity: str, own: Mapping[str, str]) -> E2BSandbox:
        sandboxes = await _sandboxes()

        async def connect() -> "AsyncSandbox":
            return await sandboxes.connect(sandbox_id, timeout=60, **self.options)

        try:
            sdk = await self._call("connect", connect, transient=Conflict)
        except Missing as error:
            raise sandbox_lost_error(self.name, identity, error) from error
        self._remember(identity, sandbox_id)
        return E2BSandbox(self, sdk, identity, own)

    async def _kill(self, sandbox_id: str) -> None:
        sandboxes = await _sandboxes()

        async def kill() -> bool:
            return await sandboxes.kill(sandbox_id, **self.options)

        with contextlib.suppress(Missing):
            await self._call("kill", kill, transient=Conflict)

    # -- this host's notes ------------------------------------------------------------------------

    def _hint(self, identity: str) -> Path:
        return self.root / "boxes" / identity

    def _remember(self, identity: str, sandbox_id: str) -> None:
        path = self._hint(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{uuid4().hex}")
        draft.write_text(sandbox_id)
        draft.replace(path)


def _noted(hint: Path) -> str | None:
    """The noted sandbox id; None if another process has killed the sandbox and removed the note."""
    try:
        return hint.read_text()
    except FileNotFoundError:
        return None


def _listed(spec: SandboxSpec) -> "SandboxNetworkOpts | None":
    """What is allowed although all else is denied. The service matches names on ports 80 and 443, and
    opens a name server for them."""
    if spec.network is not Network.LISTED:
        return None
    listed = ServiceList.of(spec.allowed_hosts)
    return {"allow_out": [*listed.names, *listed.addresses], "deny_out": [EVERYTHING]}


async def _sandboxes() -> "type[AsyncSandbox]":
    """The SDK's class. A thread imports it, because that takes half a second and heartbeats must
    continue."""
    await asyncio.to_thread(importlib.import_module, "e2b")
    from e2b import AsyncSandbox

    return AsyncSandbox
