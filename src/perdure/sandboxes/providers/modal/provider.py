"""The `modal` provider: Modal's sandboxes, through its SDK.

The sandbox's name is derived from its identity and is unique in the app. So if the answer to a
create is lost, the next try finds the sandbox. Modal cannot extend a sandbox's time limit.
Therefore each sandbox gets the longest limit, and its first process ends it at our deadline, which
`touch` extends.
"""

import asyncio
import contextlib
import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    NotFound,
    PerdureError,
    RateLimited,
)
from perdure.sandboxes.base import Network, Sandbox, SandboxInfo, SandboxSpec
from perdure.sandboxes.guest.container_options import init_command, names_missing_program
from perdure.sandboxes.guest.guest_sandbox import FOLDER, MARK
from perdure.sandboxes.guest.service_image_builds import ServiceBuild, ServiceImageBuilder
from perdure.sandboxes.guest.service_provider import OWN, SdkSandbox, ServiceList, spec_digest
from perdure.sandboxes.guest.service_retries import (
    Conflict,
    Missing,
    recheck_missing,
    sandbox_lost_error,
)
from perdure.sandboxes.image_builds import ImageBuild
from perdure.sandboxes.providers.modal import modal_client
from perdure.sandboxes.providers.modal.modal_errors import typed
from perdure.sandboxes.providers.modal.modal_image_builds import run_build
from perdure.sandboxes.spec_validation import check_identity
from perdure.settings import process_environment
from perdure.types import AccountCaps

if TYPE_CHECKING:
    import modal

T = TypeVar("T")

LONGEST_S = 24 * 3600
"""The longest time limit that Modal allows, counted from the create."""
IMAGE_S = 900.0
"""Seconds that Modal may take to pull an image that the account has not used before."""
GPU_S = 900.0
"""Seconds that a create waits for a GPU."""
SILENT_S = 5.0
"""Seconds to wait past a command's time limit, at which the service should have ended it."""
UNREACHABLE_S = 600.0
"""Seconds of silence after which a sandbox counts as lost, even if Modal reports it as running."""
AT_ONCE = 16
"""Number of sandboxes whose tags are read concurrently."""
LONGEST_NAME = 63
NO_PROGRAM = (126, 127)
"""Exit codes of a shell that cannot execute the first process."""
IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*")
IMAGE_ID = "im-"
"""Prefix of an `environment.image` that is the id of an image in the account."""
FIRST = 'mkdir -p -m 700 "$0" && exec python3 "$@"'


class ModalSandbox(SdkSandbox):
    service = "Modal"
    provider: "ModalProvider"

    def __init__(
        self,
        provider: "ModalProvider",
        sdk: "modal.Sandbox",
        identity: str,
        own: Mapping[str, str],
    ) -> None:
        super().__init__(provider, sdk.object_id, identity, own)
        self.sdk, self.own = sdk, own

    async def touch(self, ttl_s: float) -> None:
        """Set the deadline, 24 hours after the create at the latest, and show it in a tag."""
        now = time.time()
        last = float(self.own[f"{OWN}created"]) + LONGEST_S
        expires = min(now + ttl_s, last)
        await self._guest("touch", ttl=expires - now)
        self.own = {**self.own, f"{OWN}expires": str(expires)}
        tags = dict(self.own)
        await self._call("set_tags", lambda: self.sdk.set_tags.aio(tags), in_sandbox=False)

    async def _print(self, what: str, command: str, extra_s: float) -> str:
        """Send the command on the shell's standard input, because other users can list
        arguments."""
        from modal.stream_type import StreamType

        seconds = math.ceil(self.provider.request_s + extra_s)

        async def run() -> str:
            async with asyncio.timeout(seconds + SILENT_S):
                process = await self.sdk.exec.aio(
                    *("sh", "-c", "exec sh 2>&1"),
                    stderr=StreamType.DEVNULL,
                    timeout=seconds,
                    workdir="/",
                    text=False,
                )
                process.stdin.write(command.encode())
                process.stdin.write_eof()
                await process.stdin.drain.aio()
                said = (await process.stdout.read.aio()).decode("utf-8", "replace")
            if MARK not in said and names_missing_program(said):
                raise self._lacking(self._image_error(said))
            return said

        return await self._once(what, run)

    async def _write(self, path: str, data: bytes | Path) -> None:
        async def write() -> None:
            if isinstance(data, bytes):
                await self.sdk.filesystem.write_bytes.aio(data, path)
            else:
                await self.sdk.filesystem.copy_from_local.aio(data, path)

        await self._once("upload", write)

    async def _is_there(self, error: Exception, found: PerdureError, *, in_sandbox: bool) -> bool:
        code = await self.provider.end_of(self.sdk)
        if code in NO_PROGRAM and self._is_new:
            raise self._image_error(f"its first process exited with {code}")
        if code is None and in_sandbox:
            lasts = self.provider.silences.lasts(self._id)
            if lasts > UNREACHABLE_S:
                why = f"(it runs, but has not answered for {lasts:.0f} s: {found})"
                raise sandbox_lost_error("modal", self.identity, why)
        return code is None

    def _image_error(self, said: str) -> ConfigurationError:
        return ConfigurationError(
            f"the image of sandbox {self.identity!r} lacks python3 or a shell tool: {said[-300:]}"
        )


class ModalProvider(ServiceImageBuilder):
    """`MODAL_TOKEN_ID`, `MODAL_TOKEN_SECRET` and `MODAL_ENVIRONMENT` name the account. Set
    `PERDURE_MODAL__SCOPE` if a deployment has several hosts, or if deployments share an account.
    """

    name = "modal"
    limits = frozenset({"memory_mb", "cpus", "output_mb", "gpu"})
    ample = frozenset({"disk_mb"})  # 512 GiB, which a create cannot change
    account_caps = AccountCaps(creates_per_s=5, starting=32)
    """A cautious start. Refusals show what the account allows."""
    account_variables = ("MODAL_SERVER_URL", "MODAL_ENVIRONMENT", "MODAL_TOKEN_ID")
    typed = staticmethod(typed)

    @property
    def _named_scope(self) -> str:
        return self.settings.modal.scope

    def check(self) -> Sequence[str]:
        missing = self._missing_package("modal")
        for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
            if not process_environment.foreign(name):
                missing.append(f"{name} is not set; make a token at https://modal.com/settings")
        return missing

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        try:
            return await recheck_missing(lambda: self._found(identity))
        except Missing as error:
            raise NotFound(f"no modal sandbox {identity!r}") from error

    async def _list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        wanted = {**labels, f"{OWN}scope": self._scope}

        async def found() -> Sequence["modal.Sandbox"]:
            it = await self._connection()
            import modal  # loaded by now

            listed = modal.Sandbox.list.aio(app_id=it.app.app_id, tags=wanted, client=it.client)
            async with asyncio.timeout(self.request_s):
                return [sdk async for sdk in listed]

        listed = await self._call("list", found, transient=Missing)
        seats = asyncio.Semaphore(AT_ONCE)

        async def shown(sdk: "modal.Sandbox") -> SandboxInfo | None:
            async with seats:
                with contextlib.suppress(Missing):  # it has just ended
                    return self._info(await self._tags(sdk))
                return None

        shows = await asyncio.gather(*map(shown, listed))
        return [info for info in shows if info is not None]

    def _info(self, tags: Mapping[str, str]) -> SandboxInfo:
        return SandboxInfo(
            identity=tags[f"{OWN}identity"],
            provider=self.name,
            alive=True,  # the list has no others
            created=float(tags[f"{OWN}created"]),
            # the clock inside decides: a sandbox that is listed has not expired
            expires=max(float(tags[f"{OWN}expires"]), time.time() + 1),
            labels={name: value for name, value in tags.items() if not name.startswith(OWN)},
        )

    async def kill(self, identity: str) -> None:
        check_identity(identity)

        async def end() -> None:
            async with asyncio.timeout(self.request_s):
                sdk = await self._look(identity)
                await sdk.terminate.aio(wait=True)

        with contextlib.suppress(Missing):
            await self._call("terminate", end, transient=Conflict)

    # -- making -----------------------------------------------------------------------------------

    async def _create(self, spec: SandboxSpec, identity: str) -> ModalSandbox:
        own = self._labels(spec, identity)
        box = await self._make_by(lambda: self._make(spec, identity, own), identity)
        self._refuse_other_spec(identity, box.own, own)
        await box.set_up(spec)
        return box

    async def _make(self, spec: SandboxSpec, identity: str, own: Mapping[str, str]) -> ModalSandbox:
        """Create it, or adopt the one that has its name.

        Raises: RateLimited when the account is full and has none of this name.
        """
        try:
            return ModalSandbox(self, await self._ask(spec, identity, own), identity, own)
        except (Conflict, RateLimited) as error:
            if isinstance(error, RateLimited) and error.limit != "concurrency":
                raise
            try:
                return await self._found(identity)
            except Missing:
                if isinstance(error, RateLimited):
                    raise error from None
                # one of this name is ending
                raise ControlPlaneError(str(error)) from error

    async def _ask(
        self, spec: SandboxSpec, identity: str, own: Mapping[str, str]
    ) -> "modal.Sandbox":
        async def create() -> "modal.Sandbox":
            it, limits, gpu = await self._connection(), spec.limits, self._gpu_of(spec)
            import modal  # loaded by now

            image = await self._image(spec, it)
            async with asyncio.timeout(GPU_S if gpu else self.request_s):
                return await modal.Sandbox.create.aio(
                    *("sh", "-c", FIRST, FOLDER, *init_command(spec.ttl_s)),
                    app=it.app,
                    client=it.client,
                    name=self._name(identity),
                    tags=dict(own),
                    image=image,
                    timeout=LONGEST_S,
                    cpu=(limits.cpus, limits.cpus),
                    memory=(limits.memory_mb, limits.memory_mb),
                    gpu=gpu or None,
                    **_network(spec),
                )

        try:
            return await self._once("create", create)
        except Missing as error:
            if built := self._built_image(spec):
                self._forget(built)
                raise self._not_built(built) from error
            raise ConfigurationError(
                f"{error}; name an image that exists in environment.image or PERDURE_MODAL__IMAGE"
            ) from error

    def _image_of(self, spec: SandboxSpec) -> str:
        """A tree is uploaded into the image of the settings. Without one, the image is booted."""
        image = spec.image if spec.tree is None else None
        return image or self.settings.modal.image

    def _gpu_of(self, spec: SandboxSpec) -> str:
        return spec.limits.gpu or self.settings.modal.gpu

    def _labels(self, spec: SandboxSpec, identity: str) -> dict[str, str]:
        now = time.time()
        return {
            **super()._labels(spec, identity),
            f"{OWN}spec": spec_digest(spec, self._image_of(spec), self._gpu_of(spec)),
            f"{OWN}created": str(now),
            f"{OWN}expires": str(now + spec.ttl_s),
        }

    def _name(self, identity: str) -> str:
        """Unique in the app, which several deployments may share."""
        end = hashlib.sha256(f"{self._scope}\0{identity}".encode()).hexdigest()[:8]
        return f"{identity[: LONGEST_NAME - len(end) - 1]}-{end}"

    def _check_spec(self, spec: SandboxSpec) -> None:
        super()._check_spec(spec)
        if spec.ttl_s > LONGEST_S:
            raise ConfigurationError(
                f"ttl_s={spec.ttl_s:g}: Modal ends each sandbox after {LONGEST_S} seconds; lower "
                "PERDURE_SANDBOX__TTL_S"
            )
        if spec.image and not IMAGE.fullmatch(spec.image):  # it becomes a line of a Dockerfile
            raise ConfigurationError(f"environment.image: {spec.image!r} is not an image name")

    # -- images -----------------------------------------------------------------------------------

    async def _build(self, build: ImageBuild) -> ServiceBuild:
        async def run() -> ServiceBuild:
            return await run_build(build, await self._connection())

        return await self._call("build", run, transient=Missing)

    async def _end_late_build(self, build: ImageBuild) -> str:
        await self._read("hello", self._hello)
        return f"Modal's log of the app {self.settings.modal.app} has its output"

    async def remove_image(self, name: str) -> bool:
        """Forget the image. Modal keeps it, so that the next build is fast."""
        self._forget(name)
        return True

    async def _hello(self) -> None:
        it = await self._connection()
        await it.client.hello.aio()  # type: ignore[no-untyped-call]  # the SDK gives it no types

    async def _image(self, spec: SandboxSpec, it: modal_client.Connection) -> "modal.Image":
        """The image, pulled or built by Modal.

        Raises: ConfigurationError when Modal cannot pull it; RetryHere; the SDK's errors.
        """
        import modal

        if built := self._built_image(spec):
            return modal.Image.from_id(self._image_id(built), client=it.client)
        name = self._image_of(spec)
        if name.startswith(IMAGE_ID):
            return modal.Image.from_id(name, client=it.client)
        try:
            async with asyncio.timeout(IMAGE_S):
                return await modal.Image.from_registry(name).build.aio(it.app)
        except modal.exception.RemoteError as error:
            raise ConfigurationError(
                f"environment.image: Modal cannot pull {name!r}: {error}; images that need "
                "credentials are refused: build one in the account and name its id (im-...)"
            ) from error

    # -- finding ----------------------------------------------------------------------------------

    async def _connection(self) -> modal_client.Connection:
        async with asyncio.timeout(self.request_s):
            return await modal_client.connection(self.settings.modal.app)

    async def _look(self, identity: str) -> "modal.Sandbox":
        """Raises: the SDK's errors."""
        it = await self._connection()
        import modal  # loaded by now

        app, name = self.settings.modal.app, self._name(identity)
        return await modal.Sandbox.from_name.aio(app, name, client=it.client)

    async def _found(self, identity: str) -> ModalSandbox:
        """Raises: Missing."""
        sdk = await self._read("from_name", lambda: self._look(identity))
        return ModalSandbox(self, sdk, identity, await self._tags(sdk))

    async def _tags(self, sdk: "modal.Sandbox") -> Mapping[str, str]:
        """Raises: Missing."""
        return await self._read("get_tags", sdk.get_tags.aio)

    async def end_of(self, sdk: "modal.Sandbox") -> int | None:
        """The exit code of a sandbox that has ended; None if it is alive."""
        try:
            return await recheck_missing(lambda: self._read("poll", sdk.poll.aio))
        except Missing:
            return 0

    async def _read(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        async def read() -> T:
            async with asyncio.timeout(self.request_s):
                return await call()

        return await self._call(what, read)


def _network(spec: SandboxSpec) -> dict[str, Any]:
    """With a list, all else is blocked."""
    if spec.network is not Network.LISTED:
        return {"block_network": spec.network is not Network.HOST}
    listed = ServiceList.of(spec.allowed_hosts)
    return {
        "outbound_cidr_allowlist": list(listed.addresses),
        "outbound_domain_allowlist": list(listed.names),
    }
