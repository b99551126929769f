"""The `docker` provider: containers of a Docker engine, on this host or behind `DOCKER_HOST`.

The identity is part of the container's name, so an engine makes it once. The guest program runs
commands and keeps their records. Folders of this host are bound if the engine sees them, or uploaded.
"""

import asyncio
import io
import json
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    MissingDependency,
    NotFound,
)
from perdure.sandboxes.agent_user import ROOT_VARIABLES
from perdure.sandboxes.base import Mount, Network, Sandbox, SandboxInfo, SandboxSpec, SidecarResult
from perdure.sandboxes.guest.container_options import (
    DEADLINE,
    ROOT,
    ContainerSandbox,
    missing_programs_error,
    names_missing_program,
)
from perdure.sandboxes.guest.guest_sandbox import FOLDER
from perdure.sandboxes.guest.service_provider import ServiceProvider
from perdure.sandboxes.guest.service_retries import (
    Conflict,
    Missing,
    retry_transient,
    sandbox_lost_error,
)
from perdure.sandboxes.host.forward_proxy import proxy_variables
from perdure.sandboxes.host.sandbox_programs import program
from perdure.sandboxes.image_architecture import check_architecture
from perdure.sandboxes.image_builds import (
    DOCKERFILE,
    MOST_COMPARED,
    BuildOutput,
    ImageBuild,
    LocalImageBuilder,
    base_images,
    draft_name_of,
    limit_options,
    qualified_name,
    run_build,
)
from perdure.sandboxes.image_pulls import Puller, PullFailed, Pulls, last_error
from perdure.sandboxes.providers.docker import docker_cli
from perdure.sandboxes.providers.docker.docker_run import (
    SPARE_PIDS,
    DockerEngine,
    build_network_command,
    engine_of,
    run_command,
)
from perdure.sandboxes.providers.docker.docker_sidecars import SIDECAR_LABEL, DockerSidecars
from perdure.sandboxes.sidecar_boot import SidecarFailed, boot_sidecars
from perdure.sandboxes.spec_validation import check_folders, check_identity
from perdure.settings.settings_tree import Settings
from perdure.types import Sidecar

REQUEST_S = 60.0
BOOT_S = 300.0
LABEL = "perdure"
LISTED_AT_ONCE = 8
REMOTE = (
    "its engine does not see this host's folders, where the proxy is: use an engine of this host"
)
IMAGE_FORMAT = "{{.Id}} {{.Architecture}} {{json .Config.Env}}"
IMAGE_STAYS_S = 60.0
"""Seconds for which the id found for an image name is trusted."""
PULLER = Puller(
    log_in="run `docker login {registry}` as the user of the workers",
    storage="the engine's images (`docker info` names its Docker Root Dir)",
)


@dataclass(frozen=True)
class Found:
    """One of our containers, as `inspect` shows it."""

    name: str
    state: str
    labels: Mapping[str, str]
    out_of_memory: bool

    @property
    def own(self) -> dict[str, Any]:
        return dict(json.loads(self.labels[f"{LABEL}.spec"]))

    @property
    def identity(self) -> str:
        return self.labels[f"{LABEL}.identity"]

    @property
    def sidecar(self) -> str:
        """Its name; empty for the sandbox's own container."""
        return self.labels.get(SIDECAR_LABEL, "")

    @property
    def is_running(self) -> bool:
        return self.state in ("running", "created")


class DockerSandbox(ContainerSandbox):
    service = "Docker"

    def __init__(self, provider: "DockerProvider", found: Found) -> None:
        own = found.own
        super().__init__(found.identity, own["workdir"], packs=provider.root / "packs")
        self.provider, self.name = provider, found.name
        self.enforced: Mapping[str, str] = own["enforced"]
        self._bound: frozenset[str] = frozenset(own["bound"])
        self._variables: Mapping[str, str] = own["env"]
        self._sidecars: Sequence[str] = own.get("sidecars", ())
        self.proxy_socket = provider.proxy_socket(found.identity)

    async def touch(self, ttl_s: float) -> None:
        await self._guest("touch", ttl=ttl_s)

    async def sidecar_exec(
        self, name: str, argv: Sequence[str], *, user: str | None = None, timeout_s: float
    ) -> SidecarResult:
        as_user = ("--user", user) if user else ()
        said = await docker_cli.call(
            "exec", *as_user, f"{self.name}.{name}", *argv, seconds=timeout_s
        )
        if said.code == 0 or not said.err.startswith(docker_cli.REFUSALS):
            return SidecarResult(said.code, said.out, said.err.encode())
        if isinstance(found := docker_cli.typed(f"exec in {name}", said.err), Missing):
            if not await self.provider.is_running(self.name):
                raise self.provider.sandbox_lost_error(self.identity, said.err)
            raise NotFound(f"the sidecar {name!r} has ended") from found
        raise found

    async def kill(self) -> None:
        if self._sidecars:
            await self.provider.kill(self.identity)
        else:
            await self.provider.remove([self.name])
            self.provider.remove_proxy(self.identity)

    # -- how the guest is reached -----------------------------------------------------------------

    async def _print(self, what: str, command: str, extra_s: float) -> str:
        """A shell reads the line from standard input, because any user can list arguments."""
        argv, given = ("sh", "-c", 'line=$(cat) && eval "$line"'), command.encode()
        said = await self._exec(*argv, what=what, seconds=REQUEST_S + extra_s, given=given)
        return said.out.decode("utf-8", "replace")

    async def _write_and_print(self, what: str, path: str, data: bytes | Path, command: str) -> str:
        line = f'(umask 077; mkdir -p "${{1%/*}}" && cat >"$1") && {command}'
        argv = ("sh", "-c", line, "sh", path)
        said = await self._exec(*argv, what=what, seconds=BOOT_S, given=data)
        return said.out.decode("utf-8", "replace")

    async def _exec(
        self, *argv: str, what: str, seconds: float, given: bytes | Path | None = None
    ) -> docker_cli.CliOutput:
        options = ("--interactive",) if given is not None else ()
        said = await docker_cli.call(
            *("exec", *options, "--user", ROOT, "--workdir", "/", self.name, *argv),
            seconds=seconds,
            given=given,
            what=what,
        )
        if said.code == 0:
            return said
        words = f"{said.err} {said.out[-400:].decode('utf-8', 'replace')}".strip()
        if isinstance(found := docker_cli.typed(what, words), Missing):
            raise self.provider.sandbox_lost_error(self.identity, words)
        if said.code in (126, 127) and names_missing_program(words):
            raise self._lacking(missing_programs_error(self.identity, words))
        if not await self.provider.is_running(self.name):
            raise self.provider.sandbox_lost_error(self.identity, words)
        if docker_cli.lacks_processes(words):
            await self.provider.make_room(self.name)
        raise found

    # -- set-up -----------------------------------------------------------------------------------

    def _sent(self, spec: SandboxSpec) -> Sequence[Mount]:
        return [mount for mount in spec.mounts if mount.target not in self._bound]

    async def _boot_sidecars(self, spec: SandboxSpec) -> None:
        await self.provider.boot_sidecars(spec, self.identity)


class DockerProvider(ServiceProvider, LocalImageBuilder):
    """`DOCKER_HOST` or Docker's context selects the engine. Its sandboxes have no network, so model
    calls need a relay, unless `PERDURE_DOCKER__NETWORK` names a network of the engine."""

    name = "docker"
    tells_workdir = True
    reads_sidecars = True
    networks = frozenset(Network)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.host_bound = docker_cli.is_on_this_host()
        self._asked: DockerEngine | None = None
        self._ids: dict[str, tuple[float, str]] = {}
        """Image name -> until when to trust it, and the image's id."""
        self._variables: dict[str, Mapping[str, str]] = {}
        """Image id -> the variables it sets."""
        self._pulls = Pulls(self.root / "pulls", settings.sandbox.image_mirror, PULLER)

    @property
    def _named_scope(self) -> str:
        return self.settings.docker.scope

    @property
    def sees_host(self) -> bool:
        return False

    def check(self) -> Sequence[str]:
        try:
            docker = program("docker")
        except MissingDependency as error:
            return [str(error)]
        try:
            tried = subprocess.run(
                [docker, "version", "--format", "{{.Server.Version}}"],
                capture_output=True,
                check=False,
                text=True,
                timeout=15,
            )
        except subprocess.TimeoutExpired:
            return ["the Docker engine does not answer; check DOCKER_HOST"]
        if tried.returncode == 0:
            return []
        words = tried.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return [f"no Docker engine answers: {words[0]}; start it, or set DOCKER_HOST"]

    def _check_spec(self, spec: SandboxSpec) -> None:
        super()._check_spec(spec)
        check_folders(spec)

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        found = await self._find(self._name(identity))
        if found is None:
            raise NotFound(f"no docker sandbox {identity!r}")
        return await self._adopt(found)

    async def _list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        few = asyncio.Semaphore(LISTED_AT_ONCE)

        async def info(found: Found) -> SandboxInfo:
            own = found.own
            async with few:
                expires = await self._deadline(found) or own["created"] + own["ttl"]
            return SandboxInfo(
                identity=found.identity,
                provider=self.name,
                alive=found.is_running and not found.sidecar,
                created=own["created"],
                expires=expires,
                labels=own["labels"],
            )

        wanted = labels.items()
        found = [one for one in await self._ours() if wanted <= one.own["labels"].items()]
        # a sandbox of which only sidecars exist is listed too, so that the sweep kills it
        by_identity = {one.identity: one for one in sorted(found, key=lambda one: not one.sidecar)}
        return await asyncio.gather(*map(info, by_identity.values()))

    async def kill(self, identity: str) -> None:
        check_identity(identity)
        name = self._name(identity)
        known = await self._listed("{{.Names}}", f"label={LABEL}.identity={identity}")
        await self.remove([name, *(one for one in known if one != name)])
        await self._remove_folders(name)
        self.remove_proxy(identity)

    async def _remove_folders(self, sandbox: str) -> None:
        """Remove the volumes that its containers shared. They must be gone."""

        async def remove() -> None:
            said = await docker_cli.done(
                *("volume", "ls", "--quiet", "--filter", f"name={sandbox}."), seconds=REQUEST_S
            )
            if names := [one for one in said.split() if one.startswith(f"{sandbox}.")]:
                await docker_cli.done("volume", "rm", "--force", *names, seconds=REQUEST_S)

        await retry_transient(remove)

    def proxy_socket(self, identity: str) -> Path:
        """In a folder of its own, which the container has too."""
        return self.root / "proxies" / identity / "proxy"

    def remove_proxy(self, identity: str) -> None:
        shutil.rmtree(self.proxy_socket(identity).parent, ignore_errors=True)

    async def remove(self, names: Sequence[str]) -> None:
        """Remove containers that may exist. The first is removed first, so no sidecar joins it."""

        async def remove() -> None:
            said = await docker_cli.call("rm", "--force", "--volumes", *names, seconds=REQUEST_S)
            if said.code and await self._inspect(names):
                raise ControlPlaneError(f"docker rm: {said.err}")

        await retry_transient(remove)

    # -- making -----------------------------------------------------------------------------------

    async def _create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        box = await self._adopt(await self._make(spec, identity))
        await box.set_up(spec)
        return box

    async def _make(self, spec: SandboxSpec, identity: str) -> Found:
        """Create the container; if the engine says that its name is taken, look it up."""
        name = self._name(identity)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        engine = await self._engine()
        image = await self._present(spec.image or self.settings.docker.image)
        labels = self._labels(identity, self._own(spec, engine, self._variables[image]))
        try:
            proxy = self._proxy(spec, engine, identity)
            command = run_command(
                spec, name, image, labels, engine, settings=self.settings, proxy=proxy
            )
            await docker_cli.done(*command, seconds=BOOT_S, what="run")
        except Conflict:  # another creator was quicker: both use its container
            return await retry_transient(lambda: self._made(name))
        except Missing as error:  # it was killed before it started
            raise self.sandbox_lost_error(identity, error) from error
        except ConfigurationError:
            await self.kill(identity)
            raise
        except ControlPlaneError as error:
            self._ids.clear()  # one may be the id of an image that is gone
            raise await self._half_made(identity, error) from error
        return Found(name, "running", labels, out_of_memory=False)

    def _proxy(self, spec: SandboxSpec, engine: DockerEngine, identity: str) -> Path | None:
        """The socket at which the proxy to listed hosts will be served; its folder exists."""
        if spec.network is not Network.LISTED:
            return None
        if why := self.no_list(()) or ("" if engine.binds else REMOTE):
            raise ConfigurationError(f"network: docker takes no list of hosts: {why}")
        socket = self.proxy_socket(identity)
        socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return socket

    async def _made(self, name: str) -> Found:
        """The engine reserves a name shortly before its container can be found."""
        found = await self._find(name)
        if found is None:
            raise ControlPlaneError(f"docker container {name} was created but cannot be found")
        return found

    async def _half_made(self, identity: str, error: ControlPlaneError) -> Exception:
        """Kill a container that was created but did not start, so that no create adopts it later."""
        found = await self._find(self._name(identity))
        if found is not None and found.state == "created":
            await self.kill(identity)
            if names_missing_program(str(error)):
                return missing_programs_error(identity, str(error))
        return error

    async def _adopt(self, found: Found) -> DockerSandbox:
        if found.state == "created":
            # its creator died or is about to start it; starting twice does no harm
            try:
                await docker_cli.done("start", found.name, seconds=BOOT_S)
            except (Conflict, Missing) as error:
                raise self.sandbox_lost_error(found.identity, error) from error
        elif found.state != "running":
            why = "it ran out of memory" if found.out_of_memory else f"it is {found.state}"
            raise self.sandbox_lost_error(found.identity, why)
        return DockerSandbox(self, found)

    def _own(
        self, spec: SandboxSpec, engine: DockerEngine, variables: Mapping[str, str]
    ) -> dict[str, Any]:
        who = {} if spec.image is None else ROOT_VARIABLES
        return {
            "created": time.time(),
            "ttl": spec.ttl_s,
            "workdir": spec.workdir,
            "labels": dict(spec.labels),
            "env": {**who, **variables, **proxy_variables(spec.network, spec.sidecars)},
            "enforced": {"disk": "tmpfs of each folder", "output": "watched", **engine.limits},
            "bound": [mount.target for mount in spec.mounts] if engine.binds else [],
            "sidecars": [*spec.sidecars],
        }

    def _labels(self, identity: str, own: Mapping[str, Any]) -> Mapping[str, str]:
        return {
            f"{LABEL}.scope": self._scope,
            f"{LABEL}.identity": identity,
            f"{LABEL}.spec": json.dumps(own),
        }

    def sidecars_refusal(self, sidecars: Mapping[str, Sidecar]) -> str:
        if runtime := self.settings.docker.runtime:
            return f"containers of PERDURE_DOCKER__RUNTIME={runtime} share no namespaces"
        return ""

    def no_list(self, hosts: Sequence[str]) -> str:
        if not self.host_bound:
            return REMOTE
        if self.settings.docker.network:
            return "PERDURE_DOCKER__NETWORK opens a network for every sandbox: unset it"
        if runtime := self.settings.docker.runtime:
            return f"containers of PERDURE_DOCKER__RUNTIME={runtime} open no sockets of this host"
        return ""

    async def boot_sidecars(self, spec: SandboxSpec, identity: str) -> None:
        """Raises: SidecarFailed; SandboxLost."""
        engine = await self._engine()
        own_image = await self._present(spec.image or self.settings.docker.image)
        images = {
            name: await self._present(self.image_used_for(one.image or ""))
            for name, one in spec.sidecars.items()
        }
        labels = self._labels(identity, self._own(spec, engine, {}))
        env = proxy_variables(spec.network, spec.sidecars)
        containers = DockerSidecars(self._name(identity), labels, spec.limits, images, env=env)
        await containers.start_first_process(own_image)
        try:
            await boot_sidecars(spec.sidecars, containers)
        except SidecarFailed:
            await self.kill(identity)  # the next try starts with new ones
            raise

    # -- images -----------------------------------------------------------------------------------

    async def _present(self, name: str) -> str:
        """The id of the image of this name. Pulls it if the engine does not have it."""
        until, found = self._ids.get(name, (0.0, ""))
        if time.monotonic() > until:
            found = await retry_transient(
                lambda: self._pulls.present(name, self._image, self._pull)
            )
            self._ids[name] = time.monotonic() + IMAGE_STAYS_S, found
        return found

    async def image_workdir(self, image: str) -> str:
        form = ("--format", "{{.Config.WorkingDir}}")
        found = await self._present(self.image_used_for(image))
        return await docker_cli.done("image", "inspect", *form, found, seconds=REQUEST_S)

    async def _image(self, name: str) -> str | None:
        said = await docker_cli.call(
            *("image", "inspect", "--format", IMAGE_FORMAT, name),
            seconds=REQUEST_S,
            what="image inspect",
        )
        if said.code == 0:
            found, architecture, variables = said.out.decode().strip().split(" ", 2)
            if self.host_bound:  # another engine's emulators cannot be seen from here
                check_architecture(name, architecture, platform.machine())
            lines = json.loads(variables) or []
            self._variables[found] = dict(line.split("=", 1) for line in lines if "=" in line)
            return found
        if _lacks_image(said.err):
            return None
        raise docker_cli.typed("image inspect", said.err)

    async def _pull(self, name: str) -> str:
        seconds = self.settings.sandbox.pull_timeout_s
        said = await docker_cli.call("pull", "--quiet", name, seconds=seconds)
        if said.code:
            raise PullFailed(last_error(said.err) or "no reason given")
        found = await self._image(name)
        if found is None:
            raise ControlPlaneError(f"image {name!r} vanished after its pull")
        return found

    async def local_images(self) -> Mapping[str, int]:
        return {
            qualified_name(name): size
            for size, tags, digests, _ in await self._described_images(None)
            for name in (*(tags or ()), *(digests or ()))
        }

    async def local_layers(self) -> Sequence[Sequence[str]]:
        return [layers or () for *_, layers in await self._described_images(MOST_COMPARED)]

    async def _described_images(self, most: int | None) -> Sequence[Any]:
        """Bytes, tags, digests and layers of each image that is here."""
        listed = await docker_cli.done("image", "ls", "--quiet", "--no-trunc", seconds=REQUEST_S)
        ids = [*dict.fromkeys(listed.split())][:most]
        form = (
            "--format",
            "[{{.Size}},{{json .RepoTags}},{{json .RepoDigests}},{{json .RootFS.Layers}}]",
        )
        found: list[Any] = []
        for start in range(0, len(ids), MOST_COMPARED):
            some = ids[start : start + MOST_COMPARED]
            # an image may vanish meanwhile, so the exit code does not matter
            said = await docker_cli.call("image", "inspect", *form, *some, seconds=REQUEST_S)
            found += [json.loads(line) for line in said.out.splitlines() if line.strip()]
        return found

    async def image_size(self, name: str) -> int | None:
        said = await docker_cli.call(
            *("image", "inspect", "--format", "{{.Size}}", name),
            seconds=REQUEST_S,
            what="image inspect",
        )
        if said.code == 0:
            return int(said.out)
        if _lacks_image(said.err):
            return None
        raise docker_cli.typed("image inspect", said.err)

    async def pull_image(self, name: str) -> None:
        await self._present(name)

    async def rename_image(self, name: str, new: str) -> None:
        await docker_cli.done("tag", name, new, seconds=REQUEST_S)
        await docker_cli.done("rmi", name, seconds=REQUEST_S)

    async def remove_image(self, name: str) -> bool:
        said = await docker_cli.call("rmi", name, seconds=REQUEST_S)
        self._ids.pop(name, None)
        return said.code == 0 or _lacks_image(said.err)

    async def build_image(self, build: ImageBuild) -> BuildOutput:
        dockerfile = build.context / DOCKERFILE
        for name in base_images(dockerfile.read_text(errors="replace")):
            if await self._image(name) is None:
                found = await self._present(name)
                await docker_cli.done("tag", found, name, seconds=REQUEST_S)
        async with self._build_network(build) as network:
            command = [
                # BuildKit cannot use another container's network
                *(("/usr/bin/env", "DOCKER_BUILDKIT=0") if build.proxy else ()),
                *(program("docker"), "build", "--tag", draft_name_of(build.image), "--force-rm"),
                *("--network", network),
                *(f"--build-arg={name}={value}" for name, value in build.variables.items()),
                *limit_options(build.limits),
                *("--file", str(dockerfile), str(build.context)),
            ]
            return await run_build(command, build, ends_on_signal=True)

    @property
    def has_build_proxy(self) -> bool:  # type: ignore[override]  # it depends on the engine
        return self.host_bound

    @asynccontextmanager
    async def _build_network(self, build: ImageBuild) -> AsyncIterator[str]:
        """The build's `--network`: of a container whose only way out is the build's proxy. If this
        process is killed, the container ends soon after the build's time limit."""
        if build.proxy is None:
            yield "host" if build.network is Network.HOST else "none"
            return
        if not (await self._engine()).binds:
            raise ConfigurationError(f"phases.environment.network: {REMOTE}")
        name = f"{LABEL}-build-{uuid4().hex[:12]}"
        image = await self._proxy_image(build)
        try:
            await docker_cli.done(
                *build_network_command(name, image, build.proxy, build.timeout_s + BOOT_S),
                seconds=BOOT_S,
                what="run",
            )
            listening = f"until [ -e {FOLDER}/forwarder ]; do sleep 0.05; done"
            await docker_cli.done("exec", name, "sh", "-c", listening, seconds=REQUEST_S)
            yield f"container:{name}"
        finally:
            await asyncio.shield(self.remove([name]))

    async def _proxy_image(self, build: ImageBuild) -> str:
        """An image with Python: the build's own base image if the configured one is not here."""
        configured = self.settings.docker.image
        if await self._image(configured) is None:
            dockerfile = (build.context / DOCKERFILE).read_text(errors="replace")
            for name in base_images(dockerfile):
                words = ("run", "--rm", "--pull", "never", "--network", "none", "--entrypoint")
                said = await docker_cli.call(*words, "python3", name, "-V", seconds=BOOT_S)
                if said.code == 0:
                    return name
        return await self._present(configured)

    # -- finding ----------------------------------------------------------------------------------

    async def _find(self, name: str) -> Found | None:
        found = await self._inspect([name])
        return found[0] if found else None

    async def _ours(self) -> Sequence[Found]:
        listed = await self._listed("{{.ID}}")
        return await self._inspect(listed) if listed else []

    async def _listed(self, form: str, *filters: str) -> Sequence[str]:
        """One word for each container of our scope. `filters`: of `docker ps`."""
        scope = f"label={LABEL}.scope={self._scope}"
        options = [part for one in (scope, *filters) for part in ("--filter", one)]
        listed = await retry_transient(
            lambda: docker_cli.done(
                *("ps", "--all", "--no-trunc", "--format", form, *options), seconds=REQUEST_S
            )
        )
        return listed.split()

    async def _inspect(self, names: Sequence[str]) -> Sequence[Found]:
        said = await docker_cli.call(
            "container", "inspect", *names, seconds=REQUEST_S, what="inspect"
        )
        if said.code and not isinstance(error := docker_cli.typed("inspect", said.err), Missing):
            raise error
        return [
            Found(
                name=entry["Name"].lstrip("/"),
                state=entry["State"]["Status"],
                labels=entry["Config"]["Labels"] or {},
                out_of_memory=entry["State"].get("OOMKilled", False),
            )
            for entry in docker_cli.objects(said.out)
            if (entry["Config"]["Labels"] or {}).get(f"{LABEL}.scope") == self._scope
            and entry["State"]["Status"] != "removing"
        ]

    async def is_running(self, name: str) -> bool:
        found = await self._find(name)
        return found is not None and found.is_running

    async def make_room(self, name: str) -> None:
        """Raise the pids limit, so that the guest can end commands that fork constantly."""
        said = await docker_cli.call(
            *("container", "inspect", "--format", "{{.HostConfig.PidsLimit}}", name),
            seconds=REQUEST_S,
        )
        if said.out.strip().isdigit():
            more = str(int(said.out) + SPARE_PIDS)
            await docker_cli.call("update", "--pids-limit", more, name, seconds=REQUEST_S)

    async def _deadline(self, found: Found) -> float | None:
        """The deadline in the file that the guest writes, read without starting a process inside."""
        if not found.is_running or found.sidecar:
            return None
        said = await docker_cli.call("cp", f"{found.name}:{DEADLINE}", "-", seconds=REQUEST_S)
        try:
            with tarfile.open(fileobj=io.BytesIO(said.out)) as tar:
                file = tar.extractfile("deadline")
                return float((file.read() if file else b"").split()[0])
        except (tarfile.TarError, KeyError, ValueError, IndexError):
            return None

    def sandbox_lost_error(self, identity: str, why: object = "") -> Exception:
        return sandbox_lost_error("docker", identity, why)

    def _name(self, identity: str) -> str:
        return f"{LABEL}-{self._scope}-{identity}"

    async def _engine(self) -> DockerEngine:
        if self._asked is None:
            text = await retry_transient(
                lambda: docker_cli.done("info", "--format", "{{json .}}", seconds=REQUEST_S)
            )
            self._asked = engine_of(json.loads(text), here=self.host_bound)
        return self._asked


def _lacks_image(said: str) -> bool:
    return "no such image" in said.lower()
