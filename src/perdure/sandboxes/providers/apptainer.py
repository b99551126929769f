"""The `apptainer` provider: one instance per sandbox, without a daemon, for clusters.

`apptainer instance start` makes the namespaces over an overlay on our tmpfs. The keeper then treats
its first process like any holder: the same commands, records, limits and filter. It has never run
with the real Apptainer: the tests use `tests/doubles/apptainer_cli.py`.
"""

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from perdure.durable_files import is_whole, publish_folder
from perdure.errors import ConfigurationError, MissingDependency, RetryHere
from perdure.sandboxes import image_names
from perdure.sandboxes.agent_user import ENVIRONMENT, HOME, SYSTEM_PATH
from perdure.sandboxes.base import Mount, Network, SandboxSpec
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.forward_proxy import proxy_variables
from perdure.sandboxes.host.keeper_client import Holder, start_keeper
from perdure.sandboxes.host.namespaces import (
    NamespaceProvider,
    NamespaceSandbox,
    disk_of,
    enforced,
    gateway_of,
    needs_user_namespace,
    proxy_of,
    resolver_of,
    shared_folders,
)
from perdure.sandboxes.host.root_folder import host_programs, write_skeleton
from perdure.sandboxes.host.sandbox_folder import (
    DRAFT,
    SandboxFolder,
    SandboxMeta,
    timestamped_name,
)
from perdure.sandboxes.host.sandbox_programs import program
from perdure.sandboxes.image_pulls import Puller, PullFailed, Pulls, printed
from perdure.sandboxes.spec_validation import check_folders
from perdure.settings import process_environment

LEAST_VERSION = (1, 1)
"""The first version that makes overlays and reads images without setuid."""

PULLER = Puller(
    log_in="run `apptainer remote login docker://{registry}` as the user of the workers",
    storage="PERDURE_HOME, where images are unpacked, and of Apptainer's cache",
)

HOLD = """\
mkdir -p disk/session disk/over
{start} >&2 || exit 1
exec 5<&0
(read -r line <&5; {stop}) >/dev/null 2>&1 &
echo up
exec >/dev/null
wait
"""
"""If this shell is killed, its background process reads the end of its input and stops the
instance."""

OWN_VARIABLES = re.compile(
    r"(APPTAINER|SINGULARITY)_?|^(HOME|PWD|OLDPWD|SHLVL|_|USER|LOGNAME|TERM)$"
)


class ApptainerSandbox(NamespaceSandbox):
    """An instance. Its first process is Apptainer's, in a folder that Apptainer chooses."""

    def _folder(self, cwd: str | None) -> str | None:
        return os.path.join(self.workdir, cwd or "")


class ApptainerProvider(NamespaceProvider):
    """Images are unpacked once for each home, by `apptainer build --sandbox`."""

    name = "apptainer"
    runs_images = True
    downloads_to = "this host"

    @property
    def _binary(self) -> str:
        """Raises: MissingDependency."""
        return str(self.settings.apptainer.program or program("apptainer"))

    def check(self) -> Sequence[str]:
        try:
            program("mount")
            version = _version(self._binary)
        except (MissingDependency, RetryHere) as error:
            return [str(error)]
        if version < LEAST_VERSION:
            found = ".".join(map(str, version)) or "unknown"
            return [f"apptainer {found} is too old; install 1.1 or later"]
        return []

    async def _boot(self, spec: SandboxSpec, box: SandboxFolder) -> NamespaceSandbox:
        check_folders(spec)
        image = await self._root_of(spec)
        variables = await self._variables(image) if spec.image else {}
        plan = cgroups.plan(box.path, spec.limits)
        meta = self._meta(
            spec,
            box,
            plan,
            workdir=spec.workdir,
            env={
                **ENVIRONMENT,
                **variables,
                **proxy_variables(spec.network, spec.sidecars),
                **spec.env,
            },
            enforced=enforced(plan, spec),
            farewell=tuple(stop_command(self._binary, _name(box))),
        )
        box.create_folder(meta, spec.ttl_s)
        holder = Holder(
            tuple(self.command_over(image, spec, box)),
            *disk_of(spec),
            pid_file=str(box.path / "pid"),
            shared=shared_folders(spec, self._etc),
        )
        await start_keeper(
            box,
            plan,
            holder,
            gateway_of(spec),
            proxy_of(spec, box),
            in_own_users=needs_user_namespace(),
        )
        return self._handle(box, meta)

    def command_over(self, image: Path, spec: SandboxSpec, box: SandboxFolder) -> list[str]:
        """The command that the keeper runs in the sandbox's folder after mounting the disk."""
        start = shlex.join(start_command(self._binary, image, spec, box))
        script = HOLD.format(start=start, stop=shlex.join(stop_command(self._binary, _name(box))))
        return ["/usr/bin/env", f"PERDURE_BOX={box.path}", *_settings(), "sh", "-c", script]

    def _handle(self, box: SandboxFolder, meta: SandboxMeta) -> ApptainerSandbox:
        return ApptainerSandbox(box, meta)

    # -- images -----------------------------------------------------------------------------------

    async def images_here(self, names: Collection[str]) -> Mapping[str, int]:
        return {name: 0 for name in names if await asyncio.to_thread(self._is_here, name)}

    def _is_here(self, name: str) -> bool:
        return Path(name).exists() if Path(name).is_absolute() else is_whole(self._folder_of(name))

    def _folder_of(self, name: str) -> Path:
        return self.root / ".images" / image_names.key_of(name)

    async def _root_of(self, spec: SandboxSpec) -> Path:
        if spec.image is None:
            return await asyncio.to_thread(lambda: self._skeleton)
        if (given := Path(spec.image)).is_absolute():
            if not given.exists():
                raise ConfigurationError(f"image {spec.image!r} does not exist on this host")
            return given
        folder = self._folder_of(spec.image)

        async def find(_: str) -> str | None:
            return str(folder) if is_whole(folder) else None

        async def pull(mirrored: str) -> str:
            return await asyncio.to_thread(_build, self._binary, mirrored, folder)

        return Path(await self._pulls.present(spec.image, find, pull))

    @cached_property
    def _pulls(self) -> Pulls:
        return Pulls(self.root / ".pulls", self.settings.sandbox.image_mirror, PULLER)

    async def _variables(self, image: Path) -> Mapping[str, str]:
        """The variables that the image sets, as a command in it sees them."""
        said = await asyncio.to_thread(
            _apptainer, self._binary, "exec", "--containall", str(image), "env"
        )
        pairs = (line.split("=", 1) for line in said.splitlines() if "=" in line)
        return {name: value for name, value in pairs if not OWN_VARIABLES.search(name)}

    @cached_property
    def _skeleton(self) -> Path:
        """Empty folders, on which the host's programs are bound, and our own /etc."""
        return self._made_once(f".skeleton-{self._etc.name}", self._write_root)

    def _write_root(self, folder: Path) -> None:
        write_skeleton(folder)
        shutil.copytree(self._etc, folder / "etc", symlinks=True, dirs_exist_ok=True)


def start_command(binary: str, image: Path, spec: SandboxSpec, box: SandboxFolder) -> list[str]:
    """`apptainer instance start` of one sandbox, in the box's folder."""
    disk = box.path / "disk"
    mounts = [
        *(() if spec.image else host_programs()),
        Mount(disk / "home", HOME, writable=True),
        Mount(disk / "shm", "/dev/shm", writable=True),
        *([] if spec.image and not spec.tree else [Mount(disk / "tree", spec.workdir, True)]),
        *sorted(spec.mounts, key=lambda mount: mount.target.count("/")),
    ]
    binds = {mount.target: _bind(mount) for mount in mounts}.values()
    network = [] if spec.network is Network.HOST else ["--net", "--network", "none"]
    resolver = resolver_of(spec.network)
    return [
        *(binary, "instance", "start", "--containall", "--cleanenv", "--no-home"),
        *(["--userns"] if os.geteuid() or needs_user_namespace() else ["--no-privs"]),
        *(*network, "--hostname", "sandbox"),
        *("--overlay", str(disk / "over"), "--workdir", str(disk / "session")),
        *(part for bind in binds for part in ("--bind", bind)),
        *(("--bind", f"{resolver}:/etc/resolv.conf:ro") if resolver else ()),
        *("--pid-file", str(box.path / "pid"), str(image), _name(box)),
    ]


def stop_command(binary: str, name: str) -> list[str]:
    return [
        *("/usr/bin/env", *_settings(), binary),
        *("instance", "stop", "--signal", "KILL", "--timeout", "2", name),
    ]


def _build(binary: str, mirrored: str, folder: Path) -> str:
    """Unpack under a draft name, then rename, so that a folder named `folder` is complete."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder.with_name(timestamped_name(DRAFT))
    try:
        _apptainer(binary, "build", "--sandbox", str(draft), f"docker://{mirrored}")
        publish_folder(draft, folder)
    except RetryHere as error:
        raise PullFailed(str(error)) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return str(folder)


def _apptainer(binary: str, *arguments: str) -> str:
    """Raises: RetryHere with its last line."""
    return printed([binary, *arguments], f"apptainer {arguments[0]}")


def _version(binary: str) -> tuple[int, ...]:
    """`apptainer version 1.4.1-1.el9` -> (1, 4, 1)."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", _apptainer(binary, "--version"))
    return tuple(int(part) for part in found.groups() if part) if found else ()


def _settings() -> list[str]:
    """The variables that `apptainer` needs to find this user's instances and cache."""
    names = ("HOME", "USER", "APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")
    return [f"PATH={SYSTEM_PATH}", *process_environment.assignments(names)]


def _name(box: SandboxFolder) -> str:
    return cgroups.group_name(box.path)


def _bind(mount: Mount) -> str:
    if set(":,") & set(f"{mount.source}{mount.target}"):
        raise ConfigurationError(
            f"mount {str(mount.source)!r} holds a colon or a comma; rename the folder"
        )
    return f"{mount.source}:{mount.target}:{'rw' if mount.writable else 'ro'}"
