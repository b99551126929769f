"""The `podman` provider: sandboxes from images or, without an image, from the host's programs.

Podman makes the namespaces. The keeper then treats its container like any holder: the same commands,
records, limits and filter. The root folder is an overlay on our tmpfs.
"""

import asyncio
import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from perdure.errors import ConfigurationError, RetryHere
from perdure.sandboxes.agent_user import ENVIRONMENT, HOME, ROOT_VARIABLES, SYSTEM_PATH
from perdure.sandboxes.base import Mount, Network, SandboxSpec, SidecarResult
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.forward_proxy import PROXY_PORT, proxy_variables
from perdure.sandboxes.host.keeper_client import Holder, start_keeper
from perdure.sandboxes.host.namespaces import (
    INIT,
    NamespaceProvider,
    NamespaceSandbox,
    disk_of,
    enforced,
    gateway_of,
    proxy_of,
    shared_folders,
)
from perdure.sandboxes.host.podman_sidecars import (
    PodmanSidecars,
    SidecarImage,
    exec_in,
    shared_folder,
)
from perdure.sandboxes.host.portable_git import lacks_git, mounts_of, write_git
from perdure.sandboxes.host.root_folder import host_programs, write_skeleton
from perdure.sandboxes.host.sandbox_folder import SandboxFolder, SandboxMeta
from perdure.sandboxes.host.sandbox_programs import missing_programs, program
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
from perdure.sandboxes.image_pulls import PULL_TIMEOUT_S, Puller, PullFailed, Pulls, printed
from perdure.sandboxes.sidecar_boot import boot_sidecars
from perdure.sandboxes.spec_validation import check_folders
from perdure.settings import process_environment
from perdure.types import Sidecar
from perdure.types.containers import host_names

ULIMITS = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=32768:32768")
"""Limits of pid 1. Podman's defaults are higher than it may set inside most containers."""
HOSTS = "hosts"
MAKE_WORKDIR = b'\nRUN ["/bin/sh", "-c", ":"]\n'
"""Appended to Dockerfiles, because podman, unlike docker, creates the folder of a WORKDIR only for
a later line."""
PULLER = Puller(
    log_in="run `podman login {registry}` as the user of the workers",
    storage="podman's images (`podman info` names it graphRoot)",
)


class PodmanSandbox(NamespaceSandbox):
    async def sidecar_exec(
        self, name: str, argv: Sequence[str], *, user: str | None = None, timeout_s: float
    ) -> SidecarResult:
        self._check_alive()
        podman = ["/usr/bin/env", *_variables(), *_podman()]
        container = _sidecar_name(self.box, name)
        return await exec_in(self.box, podman, container, argv, user=user, timeout_s=timeout_s)


class PodmanProvider(NamespaceProvider, LocalImageBuilder):
    """Works as root or as an ordinary user, also in a container. Commands run as the only user of
    the sandbox's container, root without capabilities."""

    name = "podman"
    runs_images = True
    tells_workdir = True
    reads_sidecars = True
    has_build_proxy = True

    def check(self) -> Sequence[str]:
        missing = missing_programs(("podman", "mount"))
        if not missing and isinstance(found := usable_runtime(), _NoRuntime):
            missing.append(f"podman cannot run a container: {found}; install runc or crun")
        return missing

    def _handle(self, box: SandboxFolder, meta: SandboxMeta) -> NamespaceSandbox:
        return PodmanSandbox(box, meta)

    async def _boot(self, spec: SandboxSpec, box: SandboxFolder) -> NamespaceSandbox:
        image = None if spec.image is None else await self._image(spec.image)
        if image is not None:
            check_architecture(str(spec.image), image.architecture, platform.machine())
        images = {
            name: await self._sidecar_image(one.image or "") for name, one in spec.sidecars.items()
        }
        if image is not None and lacks_git(Path(image.root), image.env):
            git = await asyncio.to_thread(self._made_once, ".git", write_git)
            spec = replace(spec, mounts=(*mounts_of(git), *spec.mounts))
        check_folders(spec)
        plan = cgroups.plan(box.path, spec.limits)
        variables = {} if image is None else image.env
        meta = self._meta(
            spec,
            box,
            plan,
            workdir=spec.workdir,
            env={
                **ENVIRONMENT,
                **ROOT_VARIABLES,
                **variables,
                **proxy_variables(spec.network, spec.sidecars),
                **spec.env,
            },
            enforced=enforced(plan, spec),
            farewell=_farewell(box, spec),
        )
        files = {HOSTS: _hosts(spec), box.booting.name: ""} if spec.sidecars else {}
        box.create_folder(meta, spec.ttl_s, files=files)
        lower = self._skeleton if image is None else image.root
        disk, overlay = disk_of(spec)
        root = f"lowerdir={lower},upperdir=disk/root.upper,workdir=disk/root.work"
        command, pid_file = self.command(spec, box), str(box.path / "pid")
        shared = shared_folders(spec, self._etc)
        if os.geteuid() == 0:
            holder = Holder(tuple(command), disk, overlay, root, pid_file, shared=shared)
        else:
            overlays = {"disk/root": f"{root},userxattr"}
            overlays |= {"disk/tree": overlay} if overlay else {}
            overlays |= {folder: f"ro,{options}" for folder, options in shared.items()}
            command = _in_own_users(command, box, disk, overlays)
            holder = Holder(tuple(command), "", None, None, pid_file)
        await start_keeper(
            *(box, plan, holder, gateway_of(spec), proxy_of(spec, box)),
            sidecars=bool(spec.sidecars),
        )
        if spec.sidecars:
            containers = PodmanSidecars(
                box,
                lambda name: _sidecar_name(box, name),
                ["/usr/bin/env", *_variables(), *_podman()],
                images,
                limits=spec.limits,
                env=proxy_variables(spec.network, spec.sidecars),
                hosts=box.path / HOSTS,
            )
            await boot_sidecars(spec.sidecars, containers)
            box.booting.unlink()
        return self._handle(box, meta)

    def command(self, spec: SandboxSpec, box: SandboxFolder) -> list[str]:
        disk = box.path / "disk"
        mounts = [
            *(() if spec.image else self._programs()),
            Mount(disk / "home", HOME, writable=True),
            Mount(disk / "shm", "/dev/shm", writable=True),
            *([] if spec.image else [Mount(disk / "tmp", "/tmp", writable=True)]),
            *([] if spec.image and not spec.tree else [Mount(disk / "tree", spec.workdir, True)]),
            *sorted(spec.mounts, key=lambda mount: mount.target.count("/")),
            *([Mount(box.path / HOSTS, "/etc/hosts")] if spec.sidecars else []),
            *(
                Mount(shared_folder(box, one.name), one.target, not one.read_only)
                for one in spec.folders
            ),
        ]
        # podman refuses two mounts with one target: the spec's replaces ours
        volumes = {mount.target: _volume(mount) for mount in mounts}.values()
        network = "host" if spec.network is Network.HOST else "none"
        return [
            *_making_folders(spec, box),
            *("/usr/bin/env", f"PERDURE_BOX={box.path}", *_variables(), *_podman()),
            *("run", "--interactive", "--rm", "--name", _name(box), "--network", network),
            *("--pidfile", str(box.path / "pid"), "--workdir", spec.workdir, "--user", "0:0"),
            *("--hostname", "sandbox", "--no-hosts", "--log-driver", "none"),
            *(["--passwd=false"] if spec.image is None else []),
            *("--security-opt", "no-new-privileges", "--cap-drop", "all"),
            *("--security-opt", "mask=/proc/locks"),
            *ULIMITS,
            *([] if spec.image else ["--read-only", "--read-only-tmpfs=false"]),
            *(part for volume in volumes for part in ("--volume", volume)),
            *("--rootfs", str(disk / "root"), *INIT),
        ]

    # -- the root folder without an image -----------------------------------------------------------

    def _programs(self) -> list[Mount]:
        return [*host_programs(), Mount(self._etc, "/etc")]

    @cached_property
    def _skeleton(self) -> Path:
        """Empty folders, on which podman mounts the host's, and the links of a merged /usr."""
        return self._made_once(".skeleton", write_skeleton)

    # -- images -----------------------------------------------------------------------------------

    async def _image(self, name: str) -> "_Image":
        """The image, pulled once and mounted as the lower layer of the sandboxes' overlays."""
        return await asyncio.to_thread(_mounted, await self._present(name))

    async def _present(self, name: str) -> str:
        """The image's id. It is pulled if it is not here."""

        async def find(name: str) -> str | None:
            return await asyncio.to_thread(_find, name)

        async def pull(name: str) -> str:
            return await asyncio.to_thread(_pull, name, self.settings.sandbox.pull_timeout_s)

        return await self._pulls.present(name, find, pull)

    async def local_images(self) -> Mapping[str, int]:
        listed = json.loads(await asyncio.to_thread(_run, "images", "--format", "json"))
        return {
            name: image["Size"]
            for image in listed
            for key in ("Names", "RepoDigests")
            for name in image.get(key) or ()
        }

    async def local_layers(self) -> Sequence[Sequence[str]]:
        listed = (await asyncio.to_thread(_run, "images", "--quiet", "--no-trunc")).split()
        ids = [*dict.fromkeys(listed)][:MOST_COMPARED]
        form = ("--format", "{{json .RootFS.Layers}}")
        said = await asyncio.to_thread(_run, "image", "inspect", *form, *ids) if ids else ""
        return [json.loads(line) or () for line in said.splitlines()]

    async def image_workdir(self, image: str) -> str:
        found = await self._present(self.image_used_for(image))
        form = ("--format", "{{.Config.WorkingDir}}")
        return (await asyncio.to_thread(_run, "image", "inspect", *form, found)).strip()

    async def image_size(self, name: str) -> int | None:
        return await asyncio.to_thread(_size, name)

    async def pull_image(self, name: str) -> None:
        await self._present(name)

    async def rename_image(self, name: str, new: str) -> None:
        await asyncio.to_thread(_run, "tag", name, new)
        await asyncio.to_thread(_run, "untag", name, name)

    async def remove_image(self, name: str) -> bool:
        return await asyncio.to_thread(_remove, name)

    async def build_image(self, build: ImageBuild) -> BuildOutput:
        dockerfile = (build.context / DOCKERFILE).read_bytes()
        for name in base_images(dockerfile.decode(errors="replace")):
            await self._base_image(name)
        given = dockerfile + MAKE_WORKDIR
        return await run_build(_build_command(build), build, ends_on_signal=False, given=given)

    async def _base_image(self, name: str) -> None:
        """Make the image available under the name in the Dockerfile."""
        if await asyncio.to_thread(_find, name) is None:
            found = await self._present(qualified_name(name))
            if await asyncio.to_thread(_find, name) is None:  # a mirror has another name
                await asyncio.to_thread(_run, "tag", found, qualified_name(name))

    def sidecars_refusal(self, sidecars: Mapping[str, Sidecar]) -> str:
        return "" if os.geteuid() == 0 else "run the workers as root, or use --sandbox docker"

    async def _sidecar_image(self, name: str) -> SidecarImage:
        found = await self._present(name)
        root = (await asyncio.to_thread(_mounted, found)).root
        (described,) = json.loads(
            await asyncio.to_thread(_run, "image", "inspect", "--format", "json", found)
        )
        config = described.get("Config") or {}
        return SidecarImage(root, config, described.get("HealthCheck") or config.get("Healthcheck"))

    @cached_property
    def _pulls(self) -> Pulls:
        return Pulls(self.root / ".pulls", self.settings.sandbox.image_mirror, PULLER)


class _Image:
    def __init__(self, root: str, env: Mapping[str, str], architecture: str) -> None:
        self.root = root
        self.env = env
        self.architecture = architecture


def _mounted(found: str) -> _Image:
    root = _run("image", "mount", found, in_its_mounts=True).strip()
    (config,) = json.loads(_run("image", "inspect", "--format", "json", found))
    variables = (config.get("Config") or {}).get("Env") or []
    env = dict(variable.split("=", 1) for variable in variables)
    return _Image(root, env, config.get("Architecture") or "")


def _find(name: str) -> str | None:
    try:
        return _run("image", "inspect", "--format", "{{.Id}}", name).strip()
    except RetryHere:
        return None


def _size(name: str) -> int | None:
    try:
        return int(_run("image", "inspect", "--format", "{{.Size}}", name))
    except RetryHere:
        return None


def _remove(name: str) -> bool:
    """Remove the image if it is here. False: a sandbox uses it, or podman refuses."""
    if (found := _find(name)) is None:
        return True
    if _is_lower_layer(_mounted(found).root):
        return False
    try:
        _run("rmi", name)
    except RetryHere:
        return False
    return True


def _is_lower_layer(root: str) -> bool:
    """Whether a sandbox mounts an overlay over this folder. Podman cannot see that mount, which is
    in another mount namespace, and would delete the sandbox's files."""
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if f"lowerdir={root}," in mounts.read_text():
                return True
    return False


def _pull(name: str, timeout_s: float) -> str:
    try:
        return _run("pull", "--quiet", name, timeout_s=timeout_s).strip()
    except RetryHere as error:
        raise PullFailed(str(error)) from None


def _run(*arguments: str, in_its_mounts: bool = False, timeout_s: float = PULL_TIMEOUT_S) -> str:
    """`in_its_mounts`: in the namespace of podman's mounts. Raises: RetryHere with its last line."""
    where = [program("podman"), "unshare"] if in_its_mounts and os.geteuid() else []
    return printed([*where, *_podman(), *arguments], f"podman {arguments[0]}", timeout_s)


def _build_command(build: ImageBuild) -> list[str]:
    """`RUN` lines of a build with a proxy share podman's network, which has only that proxy."""
    in_network: list[str] = []
    if build.proxy is not None:
        in_users = [program("podman"), "unshare"] if os.geteuid() else []
        runs = (sys.executable, "-m", "perdure.sandboxes.host.build_network")
        in_network = [*in_users, *runs, str(PROXY_PORT), str(build.proxy)]
    shares = build.proxy is not None or build.network is Network.HOST
    return [
        *("/usr/bin/env", *_variables(), *in_network, *_podman()),
        # OCI's format has no SHELL and no HEALTHCHECK
        *(
            "build",
            "--format=docker",
            "--tag",
            draft_name_of(build.image),
            "--pull=never",
            "--force-rm",
        ),
        *("--network", "host" if shares else "none", "--http-proxy=false"),
        *(part for name, value in build.variables.items() for part in _build_argument(name, value)),
        *limit_options(build.limits),
        *("--file", "-", str(build.context)),
    ]


def _build_argument(name: str, value: str) -> tuple[str, str]:
    return "--build-arg", f"{name}={value}"


# -- how podman runs here -------------------------------------------------------------------------


class _NoRuntime(str):
    """Why no runtime could run a container."""


def _podman() -> list[str]:
    """With the settings that it needs in containers and without systemd, harmless elsewhere."""
    runtime = usable_runtime()
    chosen = [] if isinstance(runtime, _NoRuntime) or not runtime else ["--runtime", runtime]
    return [*_plain_podman(), *chosen]


def _plain_podman() -> list[str]:
    return [program("podman"), "--cgroup-manager=cgroupfs", "--events-backend=file"]


@cache
def usable_runtime() -> str:
    """The first runtime that runs a container on this kernel; empty: podman's default."""
    reasons = []
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        write_skeleton(Path(folder) / "root")
        for name in ("", "runc", "crun"):
            if name and shutil.which(name, path=SYSTEM_PATH) is None:
                continue
            refusal = _try_runtime(name, f"{folder}/root")
            if refusal is None:
                return name
            reasons.append(refusal)
    return _NoRuntime("; ".join(dict.fromkeys(reasons)))


def _try_runtime(name: str, root: str) -> str | None:
    tried = subprocess.run(
        [
            *_plain_podman(),
            *(["--runtime", name] if name else []),
            *("run", "--rm", "--network=none", "--read-only", "--read-only-tmpfs=false"),
            *(*ULIMITS, "--volume", "/usr:/usr:ro", "--rootfs", root, "/bin/true"),
        ],
        capture_output=True,
        check=False,
        text=True,
    )
    if tried.returncode == 0:
        return None
    return (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]


def _variables() -> list[str]:
    """The variables that podman needs to find this user's settings and storage."""
    names = ("HOME", "XDG_RUNTIME_DIR", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")
    return [f"PATH={SYSTEM_PATH}", *process_environment.assignments(names)]


def _in_own_users(
    command: Sequence[str], box: SandboxFolder, disk: str, overlays: Mapping[str, str]
) -> list[str]:
    """For an ordinary user, who may mount the sandbox's disk only in podman's user namespace.
    `overlays`: folder -> mount options."""
    folders = ("upper", "work", "tree", "home", "shm", "tmp", "root", "root.upper", "root.work")
    script = [
        "set -e",
        f"cd {shlex.quote(str(box.path))}",
        f"mount -t tmpfs -o {shlex.quote(disk)},nosuid,nodev tmpfs disk",
        f"cd disk && mkdir {' '.join(folders)} none && cd ..",
    ]
    for folder, options in overlays.items():
        script.append(f"mount -t overlay -o {shlex.quote(options)} overlay {shlex.quote(folder)}")
    return [
        *("/usr/bin/env", *_variables(), program("podman"), "unshare"),
        *(program("unshare"), "--mount", "sh", "-c", "; ".join([*script, 'exec "$@"']), "sh"),
        *command,
    ]


def _name(box: SandboxFolder) -> str:
    return cgroups.group_name(box.path)


REMOVE = 'for _ in 1 2 3 4 5 6 7 8 9 10; do "$@" && exit; sleep 0.3; done'
"""Repeats a removal, which podman refuses while it still records the end of a container."""


def _farewell(box: SandboxFolder, spec: SandboxSpec) -> tuple[str, ...]:
    remove = (program("podman"), "rm", "--force", "--ignore", "--time", "0")
    if not spec.sidecars:
        return (*remove, _name(box))
    names = (_sidecar_name(box, name) for name in spec.sidecars)
    return ("/bin/sh", "-c", REMOVE, "sh", *remove, *names, _name(box))


def _sidecar_name(box: SandboxFolder, name: str) -> str:
    return f"{_name(box)}.{name}"


def _making_folders(spec: SandboxSpec, box: SandboxFolder) -> list[str]:
    """The beginning of a command that first makes the folders that containers share."""
    shared = [*spec.folders, *(one for it in spec.sidecars.values() for one in it.folders)]
    paths = dict.fromkeys(shlex.quote(str(shared_folder(box, one.name))) for one in shared)
    if not paths:
        return []
    return ["/bin/sh", "-c", f'mkdir -m 0777 {" ".join(paths)} && exec "$@"', "sh"]


def _hosts(spec: SandboxSpec) -> str:
    """The file /etc/hosts of every container of the sandbox."""
    names = " ".join(host_names(spec.sidecars))
    return f"127.0.0.1 localhost {names}\n::1 localhost\n"


def _volume(mount: Mount) -> str:
    if ":" in f"{mount.source}{mount.target}":
        raise ConfigurationError(f"mount {str(mount.source)!r} holds a colon; rename the folder")
    return f"{mount.source}:{mount.target}:{'rw' if mount.writable else 'ro'}"
