"""Environments: an instance's base repository and its dependencies, built once per host.

A sandbox that reaches the package index builds each; then all rollouts share it read-only. This
module owns the cache and its locks. The rollout stages make the sandboxes that use it.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from perdure.durable_files import is_whole, publish_folder
from perdure.errors import (
    Boundary,
    ConfigurationError,
    InstanceError,
    MissingDependency,
    RetryHere,
    SandboxLost,
)
from perdure.home_folder import make_readable_by_sandboxes
from perdure.instances import base_trees, dockerfile_builds, host_git, uv_program
from perdure.instances.package_index_hosts import how_to_allow, index_hosts
from perdure.instances.row_interpreter import find_python
from perdure.python_interpreters import find_uv
from perdure.sandboxes import image_names
from perdure.sandboxes.base import ExecResult, Mount, Network, SandboxProvider, SandboxSpec
from perdure.sandboxes.host.forward_proxy import UnreachedHosts, forward_proxy, variables
from perdure.sandboxes.image_builds import ImageBuilder, LocalImageBuilder
from perdure.sandboxes.phase_specs import INSTALL_LIMITS, SANDBOX_LIMITS
from perdure.sandboxes.spec_validation import check_sidecars
from perdure.storage.base import Store
from perdure.types import Environment, Instance, Limits, SharedFolder, Sidecar, SourceKind

FORMAT = 1
"""Part of every key: increase it when the content of an environment changes."""

START = Path("/proc/sys/kernel/random/boot_id")
"""Its content changes at each boot of the host."""
VENV = "/opt/perdure/venv"
WORK = "/opt/perdure/work"
UV_CACHE = "/opt/perdure/uv-cache"
UV_FOLDER = "/opt/perdure/bin"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
FIXED = {"PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}

LAST_USES = "images"
"""Folder with an empty file for each image built from a Dockerfile, which is touched at each
use."""
INSTALL_TIMEOUT_S = 1800.0
TAIL_LINES = 15
LOCK_POLL_S = (0.02, 0.5)


@dataclass(frozen=True)
class Prepared:
    """Fields of a SandboxSpec for this instance, and the base commit."""

    workdir: str
    tree: Path | None
    """The base repository, one commit; None if the image contains it."""
    image: str | None
    mounts: tuple[Mount, ...]
    env: dict[str, str]
    base_commit: str | None
    sidecars: Mapping[str, Sidecar] = field(default_factory=dict)
    folders: tuple[SharedFolder, ...] = ()


class Environments:
    """The cache below `root`: `ready/<key>`, and other folders for locks, logs and unfinished
    builds.

    Any number of processes may share it; only one at a time builds an environment.
    """

    def __init__(
        self,
        root: Path,
        store: Store,
        provider: SandboxProvider,
        *,
        runs_on: SandboxProvider | None = None,
        build_hosts: str = "",
    ) -> None:
        """`runs_on`: the provider whose sandboxes use the environments, if `provider` only builds
        them. `build_hosts`: hosts that builds may reach besides the package index."""
        self.root = root.absolute()
        self._store = store
        self._provider = provider
        self._runs_on = runs_on or provider
        self._build_hosts = build_hosts
        for folder in ("ready", "building", "locks", "logs", "caches", LAST_USES):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    async def prepare(
        self,
        instance: Instance,
        *,
        limits: Limits = INSTALL_LIMITS,
        network: Network = Network.INDEX,
        sandbox_limits: Limits = SANDBOX_LIMITS,
        allowed_hosts: Sequence[str] = (),
    ) -> Prepared:
        """The instance's environment, built if it does not exist. `limits`, `network` and, with
        Network.LISTED, `allowed_hosts` apply to the sandbox that runs its install lines,
        `sandbox_limits` to those that boot the image.

        Raises: InstanceError (no such release, or an install line fails: the message holds its last
        lines and the log's path), RetryHere (registry unreachable), ConfigurationError (this
        sandbox cannot build it), MissingDependency (this host cannot); any error of making a sandbox.
        """
        if instance.artifacts and not self._runs_on.isolated:
            raise ConfigurationError(
                f"{instance.ref} has artifacts, which --sandbox {self._runs_on.name} would take from "
                "this host's own files: use --sandbox bubblewrap"
            )
        if instance.source.kind is SourceKind.IMAGE:
            prepared = _from_image(instance, self._runs_on)
            for one in instance.environment.containers:
                if one.build is not None:
                    needs = instance.model_copy(update={"environment": one})
                    await self._build_image(needs, limits, network, allowed_hosts, sandbox_limits)
            return prepared if prepared.workdir else await self._in_its_workdir(instance, prepared)
        if instance.environment.install and not self._provider.isolated:
            raise ConfigurationError(
                f"{instance.ref} has install lines, which need a sandbox that can mount "
                f"{VENV}: use --sandbox bubblewrap instead of {self._provider.name}"
            )
        elsewhere = not self._runs_on.sees_host
        if elsewhere:
            await asyncio.to_thread(_check_portable, instance, self._runs_on)
        key = await asyncio.to_thread(environment_key, instance)
        ready = self.root / "ready" / key
        if not await asyncio.to_thread(is_whole, ready):
            async with self._locked(key):
                if not await asyncio.to_thread(is_whole, ready):
                    await self._build(instance, key, limits, network, allowed_hosts)
        return await asyncio.to_thread(_prepared, instance, ready, elsewhere)

    async def _in_its_workdir(self, instance: Instance, prepared: Prepared) -> Prepared:
        """Raises: InstanceError if the image has no WORKDIR; as a pull."""
        workdir = await self._runs_on.image_workdir(prepared.image or "")
        if workdir in ("", "/"):
            raise InstanceError(
                f"{instance.ref}: its image {prepared.image} has no WORKDIR, and / cannot be one: name "
                "a folder in `environment.workdir`"
            )
        return replace(prepared, workdir=workdir)

    async def prepare_image(
        self,
        instance: Instance,
        *,
        limits: Limits = INSTALL_LIMITS,
        network: Network,
        sandbox_limits: Limits,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """Pull or build the instance's image before a sandbox needs it. Raises: as `prepare`."""
        image = instance.environment.image or ""
        used = self._runs_on.image_used_for(image)
        if instance.environment.build is not None and used == image:
            await self._build_image(instance, limits, network, allowed_hosts, sandbox_limits)
        elif image and isinstance(self._runs_on, LocalImageBuilder):
            await self._runs_on.pull_image(used)

    async def _build_image(
        self,
        instance: Instance,
        limits: Limits,
        network: Network,
        allowed_hosts: Sequence[str],
        sandbox_limits: Limits,
    ) -> None:
        """Build the image of the instance's Dockerfile, unless it was built for this host."""
        image = instance.environment.image or ""
        if self._runs_on.image_used_for(image) != image:
            return
        builder = image_builder(instance.ref, image, self._runs_on)
        image = builder.sized_image(image, sandbox_limits)
        environment = instance.environment.model_copy(update={"image": image})
        instance = instance.model_copy(update={"environment": environment})
        key = image_names.key_of(image)
        if await builder.image_size(image) is None:
            async with self._locked(key) as lock:
                if await builder.image_size(image) is None:
                    place = dockerfile_builds.BuildPlace(
                        folder=self.root / "building" / f"{key}-{uuid4().hex[:8]}",
                        log=self.root / "logs" / f"{key}.log",
                        socket=self.root / f"{key[:12]}.index",
                        lock=lock,
                        limits=limits,
                        sandbox_limits=sandbox_limits,
                        network=network,
                        allowed_hosts=allowed_hosts,
                        build_hosts=self._build_hosts,
                    )
                    await asyncio.to_thread(self._remove_drafts, key)
                    try:
                        await dockerfile_builds.build_image(instance, builder, self._store, place)
                    finally:
                        await asyncio.to_thread(self._remove_drafts, key)
        (self.root / LAST_USES / image.rpartition(":")[2]).touch()

    @asynccontextmanager
    async def _locked(self, key: str) -> AsyncIterator[int]:
        """Allow one builder per key among all processes; the kernel frees the lock of a dead one.
        Yields the lock's descriptor.

        It polls, because each blocking flock would occupy one of the event loop's few threads.
        """
        with (self.root / "locks" / key).open("w") as file:
            pause, longest = LOCK_POLL_S
            while not _try_lock(file.fileno()):
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, longest)
            yield file.fileno()

    async def _build(
        self,
        instance: Instance,
        key: str,
        limits: Limits,
        network: Network,
        allowed_hosts: Sequence[str],
    ) -> None:
        """Build in another folder, then publish it. So a folder under `ready/` is complete, even if
        a builder is killed or the power fails."""
        await self._sweep(key)
        folder = self.root / "building" / f"{key}-{uuid4().hex[:8]}"
        for part in ("tree", "venv", "work"):
            (folder / part).mkdir(parents=True)
        try:
            await base_trees.fetch(instance.source, folder / "tree", self._store)
            if instance.environment.install:
                await asyncio.to_thread(self._check_builder, instance)
                spec = await asyncio.to_thread(self._build_spec, instance, key, folder)
                spec = replace(spec, limits=limits, network=network, allowed_hosts=allowed_hosts)
                async with self._index_access(instance, spec, key) as (spec, asked):
                    await self._install(instance, key, spec, asked)
            commit = await asyncio.to_thread(_commit, folder / "tree")
            (folder / "base_commit").write_text(commit)
            await asyncio.to_thread(make_readable_by_sandboxes, folder)
            await asyncio.to_thread(publish_folder, folder, self.root / "ready" / key)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _check_builder(self, instance: Instance) -> None:
        if problems := self._provider.check():
            raise MissingDependency(
                f"{instance.ref} has install lines, which {self._provider.name} runs on the worker's "
                f"host: {'; '.join(problems)}. Give the row an image instead, or run the workers on "
                "hosts of their own"
            )

    async def _sweep(self, key: str) -> None:
        """Remove a killed builder's leftovers of this environment, sandboxes first."""
        for left in await self._provider.list({"environment": key}):
            await self._provider.kill(left.identity)
        await asyncio.to_thread(self._remove_drafts, key)

    def _remove_drafts(self, key: str) -> None:
        for folder in (self.root / "building").glob(f"{key}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    @asynccontextmanager
    async def _index_access(
        self, instance: Instance, spec: SandboxSpec, key: str
    ) -> AsyncIterator[tuple[SandboxSpec, UnreachedHosts]]:
        """The spec of a sandbox that has only loopback. A proxy leads to the package index and to the hosts
        that the spec lists."""
        if spec.network not in (Network.INDEX, Network.LISTED):
            yield spec, UnreachedHosts()
            return
        hosts = index_hosts(instance.environment.install, self._build_hosts, spec.allowed_hosts)
        socket = self.root / f"{key[:12]}.index"
        async with forward_proxy(socket, hosts) as asked:
            env = {k: v for k, v in spec.env.items() if not k.lower().endswith("_proxy")}
            yield replace(spec, network=Network.NONE, gateway=socket, env=env), asked

    async def _install(
        self, instance: Instance, key: str, spec: SandboxSpec, asked: UnreachedHosts
    ) -> None:
        """Run the install lines under the same paths that later sandboxes use."""
        identity = f"p-{key[:24]}-build-{uuid4().hex[:8]}"
        try:
            async with await self._provider.create(spec, identity) as sandbox:
                script = install_script(instance.environment.install)
                await sandbox.put(f"{WORK}/install.sh", script.encode())
                done = await sandbox.exec(
                    ["bash", f"{WORK}/install.sh"],
                    cwd=instance.environment.workdir,
                    timeout=INSTALL_TIMEOUT_S,
                    env=variables(sandbox.gateway_url) if sandbox.gateway_url else None,
                )
        except SandboxLost as error:  # this is not the rollout's sandbox, so a retry is safe
            raise RetryHere(str(error), boundary=Boundary.SANDBOX) from error
        log = self.root / "logs" / f"{key}.log"
        await asyncio.to_thread(log.write_bytes, done.stdout + done.stderr)
        if not done.status.ok:
            raise _install_error(instance, done, log, asked)

    def _cache_of(self, instance: Instance) -> Path:
        """The uv cache that builds of this dataset share. It never affects another dataset.

        A power cut during a build may leave damaged files in it, so each boot of the host starts a
        new cache.
        """
        caches = self.root / "caches"
        start = caches / START.read_text().strip()
        for old in caches.iterdir():
            if old != start:
                shutil.rmtree(old, ignore_errors=True)
        folder = start / quote(instance.dataset, safe="")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _build_spec(self, instance: Instance, key: str, folder: Path) -> SandboxSpec:
        environment = instance.environment
        binary, prefix = find_uv(), find_python(environment.python)
        registry_env, registry_files = uv_program.registry_settings()
        return SandboxSpec(
            workdir=environment.workdir,
            mounts=(
                Mount(folder / "tree", environment.workdir, writable=True),
                Mount(folder / "venv", VENV, writable=True),
                Mount(folder / "work", WORK, writable=True),
                Mount(self._cache_of(instance), UV_CACHE, writable=True),
                Mount(binary, f"{UV_FOLDER}/uv"),
                *registry_files,
                *_python_mounts(prefix),
            ),
            env={
                **registry_env,
                "UV_CACHE_DIR": UV_CACHE,
                "UV_LINK_MODE": "copy",  # the cache and the environment are different mounts
                "UV_PYTHON_DOWNLOADS": "never",
                "VIRTUAL_ENV": VENV,
                **_environment_variables(instance),
                "PATH": f"{VENV}/bin:{UV_FOLDER}:{prefix}/bin:{SYSTEM_PATH}",
            },
            labels={"purpose": "environment", "environment": key},
            ttl_s=INSTALL_TIMEOUT_S + 60,
        )


def environment_key(instance: Instance) -> str:
    """Digest of everything that decides the content; instances with the same digest share one
    build. If there are install lines, it includes the dataset, because they read the dataset's
    cache."""
    source = instance.source
    parts = [
        FORMAT,
        source.model_dump(mode="json"),
        instance.environment.model_dump(mode="json", exclude={"sidecars", "folders"}),
        str(find_python(instance.environment.python)),
    ]
    if instance.environment.install:
        parts.append(instance.dataset)
    if source.kind is SourceKind.DIRECTORY and source.path:
        parts.append(_fingerprint(Path(source.path)))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def install_script(lines: tuple[str, ...]) -> str:
    """One shell runs all lines, so they share variables. It stops at the first failure."""
    echoed = [f"printf '%s\\n' {shlex.quote('+ ' + line)}\n{line}" for line in lines]
    return "exec 2>&1\nset -e\n" + "\n".join(echoed) + "\n"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _commit(tree: Path) -> str:
    """Commit after the install, so that build output is never in an agent's diff."""
    for folder in tree.rglob("__pycache__"):
        shutil.rmtree(folder, ignore_errors=True)
    return host_git.commit_all(tree)


def _prepared(instance: Instance, ready: Path, elsewhere: bool) -> Prepared:
    os.utime(ready)  # an age-based clean-up of the cache reads this time
    environment = instance.environment
    prefix = find_python(environment.python)
    mounts = _python_mounts(prefix)
    if elsewhere and environment.install and prefix != Path("/usr"):
        mounts = (Mount(prefix, str(prefix)),)  # an image has none of this host's files
    path = f"{prefix}/bin:{SYSTEM_PATH}"
    variables = _environment_variables(instance)
    if environment.install:
        mounts += (Mount(ready / "venv", VENV), Mount(ready / "work", WORK))
        path = f"{VENV}/bin:{path}"
        variables["VIRTUAL_ENV"] = VENV
    return Prepared(
        workdir=environment.workdir,
        tree=ready / "tree",
        image=environment.image,
        mounts=mounts,
        env={**variables, "PATH": path},
        base_commit=(ready / "base_commit").read_text(),
        sidecars=environment.sidecars,
        folders=environment.folders,
    )


def check_image(instance: Instance, provider: SandboxProvider) -> None:
    """Raises: ConfigurationError if the provider cannot run the sidecars, or cannot run or build the
    image that contains the tree."""
    for environment in instance.environments:
        check_sidecars(provider, environment.sidecars, f"{instance.ref} has")
    if instance.reads_sidecars and not provider.reads_sidecars:
        raise ConfigurationError(
            f"{instance.ref} takes artifacts from sidecars or runs commands in them, which "
            f"{provider.name} cannot do: use --sandbox podman or docker"
        )
    if instance.source.kind is not SourceKind.IMAGE:
        return
    for environment in instance.environments:
        image = environment.image or ""
        _check_workdir(instance, environment, provider)
        if not provider.runs_images:
            where = f"the image {image}" if environment.build is None else "its Dockerfile"
            raise ConfigurationError(
                f"the tree of {instance.ref} is in {where}, which "
                f"--sandbox {provider.name} cannot run: use --sandbox podman or docker, or give the row a `source`"
            )
        if environment.build is not None and provider.image_used_for(image) == image:
            image_builder(_owner(instance, image), image, provider)


def _check_workdir(instance: Instance, environment: Environment, provider: SandboxProvider) -> None:
    verifier = instance.grading.verifier
    is_unnamed = not environment.workdir or (verifier is not None and not verifier.cwd)
    if is_unnamed and not provider.tells_workdir:
        raise ConfigurationError(
            f"{instance.ref} starts in the WORKDIR of its image, which --sandbox {provider.name} does "
            "not tell: name it in `workdir` of the environment, or use --sandbox podman or docker"
        )


def _owner(instance: Instance, image: str) -> str:
    """The instance, or the sidecar of it that has this image."""
    for environment in instance.environments:
        for name, sidecar in environment.sidecars.items():
            if sidecar.image == image:
                return f"the sidecar {name} of {instance.ref}"
    return instance.ref


def image_builder(who: str, image: str, provider: SandboxProvider) -> ImageBuilder:
    """`who`: what has the Dockerfile. Raises: ConfigurationError if the provider builds no images."""
    if isinstance(provider, ImageBuilder):
        return provider
    raise ConfigurationError(
        f"{who} has a Dockerfile, and --sandbox {provider.name} builds no images: use "
        "--sandbox podman, docker, modal, e2b or daytona, or build the image where it can get it and map "
        f"{image!r} to its name in the file of PERDURE_SANDBOX__IMAGE_MAP"
    )


def _from_image(instance: Instance, provider: SandboxProvider) -> Prepared:
    check_image(instance, provider)
    if instance.environment.install:
        raise InstanceError(
            f"{instance.ref} has `install` lines for a tree inside an image: install them in the "
            "image, or give the tree as a `source`"
        )
    environment = instance.environment
    if not environment.image:
        raise InstanceError(
            f"{instance.ref} lacks `environment.image`, which must contain its tree"
        )
    variables = {**FIXED, **environment.env}
    return Prepared(
        workdir=environment.workdir,
        tree=None,
        image=environment.image,
        mounts=(),
        env=variables,
        base_commit=instance.base_commit,
        sidecars=environment.sidecars,
        folders=environment.folders,
    )


def _check_portable(instance: Instance, runs_on: SandboxProvider) -> None:
    """Raises: ConfigurationError if the environment needs this host's /usr, because it can run
    elsewhere only with the same interpreter."""
    prefix = find_python(instance.environment.python)
    if instance.environment.install and prefix == Path("/usr"):
        raise ConfigurationError(
            f"environment.python of {instance.ref} is this host's /usr, which a {runs_on.name} "
            "sandbox does not have: name a version that uv manages (`uv python install`), or give "
            "the environment as an image"
        )


def _environment_variables(instance: Instance) -> dict[str, str]:
    environment = instance.environment
    places = {"REPO": environment.workdir}
    if environment.install:
        places |= {"VENV": VENV, "WORK": WORK}
    return {**FIXED, **places, **environment.env}


def _python_mounts(prefix: Path) -> tuple[Mount, ...]:
    """The interpreter's mount; none if every sandbox has it (/usr, Perdure's Python)."""
    return () if prefix in (Path("/usr"), Path(sys.base_prefix)) else (Mount(prefix, str(prefix)),)


def _fingerprint(folder: Path) -> str:
    """Digest of the names, sizes, modes and mtimes below a folder on this host."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if ".git" not in path.parts:
            stat = path.lstat()
            digest.update(f"{path}\0{stat.st_size}\0{stat.st_mode}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _install_error(
    instance: Instance, done: ExecResult, log: Path, asked: UnreachedHosts
) -> InstanceError | RetryHere:
    output = done.stdout + done.stderr
    tail = "\n".join(output.decode("utf-8", "replace").splitlines()[-TAIL_LINES:])
    how = f"exit code {done.status.code}" if done.status.code is not None else done.status.cause
    if asked.refused and not asked.unreachable:
        told = how_to_allow(sorted(asked.refused))
        return InstanceError(
            f"{instance.ref}: `install` failed ({how}); {told}; log: {log}\n{tail}"
        )
    if uv_program.UNREACHABLE.search(output):
        return RetryHere(
            f"{instance.ref}: the package index failed during install ({how}); log: {log}\n{tail}",
            boundary=Boundary.INSTANCE,
        )
    return InstanceError(f"{instance.ref}: `install` failed ({how}); log: {log}\n{tail}")
