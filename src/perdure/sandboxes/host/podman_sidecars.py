"""The sidecars of one podman sandbox: containers in its network namespace, and in a pid namespace that
its keeper makes for them.

Each has a root folder of its own on a tmpfs, with the sandbox's limit, and ends with the keeper.
"""

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.errors import NotFound, RetryHere, SandboxLost
from perdure.sandboxes.base import SidecarResult
from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.namespaces import disk_size
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.sandboxes.host.sandbox_programs import program
from perdure.sandboxes.sidecar_boot import (
    LOG_LINES,
    LOG_OPTIONS,
    SidecarEngine,
    SidecarState,
    common_options,
    image_healthcheck,
    limits_of,
)
from perdure.types import Healthcheck, Limits, SharedFolder, Sidecar

CALL_S = 120.0
PODMAN_FAILED = 125
"""Exit code of podman itself."""
LIVE = ("running", "created", "stopping", "paused")


@dataclass(frozen=True)
class SidecarImage:
    root: str
    """Its mounted root folder."""
    config: Mapping[str, Any]
    """What `podman image inspect` calls `Config`."""
    healthcheck: Mapping[str, Any] | None


class PodmanSidecars(SidecarEngine):
    def __init__(
        self,
        box: SandboxFolder,
        name_of: Callable[[str], str],
        podman: Sequence[str],
        images: Mapping[str, SidecarImage],
        *,
        limits: Limits,
        env: Mapping[str, str],
        hosts: Path,
    ) -> None:
        """`name_of`: a sidecar's container. `podman`: the program with its settings. `env`: variables of
        every sidecar. `hosts`: the file that names them."""
        self._box, self._name_of, self._podman = box, name_of, podman
        self._images, self._limits, self._env, self._hosts = images, limits, env, hosts

    async def start(self, name: str, sidecar: Sidecar) -> None:
        image, holder = self._images[name], self._box.booted.holder
        if holder is None:
            raise SandboxLost(f"podman sandbox {self._box.identity!r} has ended")
        folder = self._box.path / f"sidecar.{name}"
        folder.mkdir(exist_ok=True)
        limits = limits_of(sidecar, self._limits)
        overlay = f"lowerdir={image.root},upperdir=upper,workdir=work"
        folders = {shared_folder(self._box, one.name): one for one in sidecar.folders}
        script = [
            "set -e",
            f"cd {shlex.quote(str(folder))}",
            f"mount -t tmpfs -o {disk_size(limits)},nosuid,nodev tmpfs .",
            f"cd {shlex.quote(str(folder))}",
            "mkdir upper work root",
            f"mount -t overlay -o {shlex.quote(overlay)} overlay root",
            *(_fill(path, image.root, one.target) for path, one in folders.items()),
        ]
        config = image.config
        given = sidecar.model_copy(
            update={
                "env": {**_variables(config), **self._env, **sidecar.env},
                "workdir": sidecar.workdir or config.get("WorkingDir") or "/",
                "user": sidecar.user or config.get("User") or "0",
            }
        )
        command = [
            *(*self._podman, "run", "--detach", "--name", self._name_of(name)),
            *("--network", f"ns:/proc/{holder.pid}/ns/net"),
            *("--pid", f"ns:/proc/{self._box.sidecars}/ns/pid", "--no-hosts"),
            *("--volume", f"{self._hosts}:/etc/hosts:ro"),
            *(f"--volume={path}:{one.target}:{_mode(one)}" for path, one in folders.items()),
            *("--hostname", name),
            *common_options(given, limits),
            *("--log-driver", "k8s-file", *LOG_OPTIONS, "--log-opt", f"path={self._log(name)}"),
            *("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=32768:32768"),
            *("--security-opt", "mask=/proc/locks", "--entrypoint", "[]"),
            *("--rootfs", str(folder / "root"), *_argv(sidecar, config)),
        ]
        in_mounts = [program("unshare"), "--mount", "sh", "-c", "; ".join([*script, 'exec "$@"'])]
        if folders:  # they are on the sandbox's disk, which the monitor of its container sees
            monitor = int(procfs.stat(holder.pid)[1])
            in_mounts = [program("nsenter"), f"--mount=/proc/{monitor}/ns/mnt", *in_mounts]
        code, said = await self._call([*in_mounts, "sh", *command])
        if code != 0:
            raise RetryHere(f"the sidecar {name!r} did not start: {said[-400:]}")

    async def state(self, name: str) -> SidecarState:
        form = "{{.State.Status}} {{.State.ExitCode}}"
        code, said = await self._call(
            [*self._podman, "container", "inspect", "--format", form, self._name_of(name)]
        )
        if code != 0:
            raise SandboxLost(f"podman sandbox {self._box.identity!r} has ended: {said[-400:]}")
        status, exit_code = said.split()[-2:]
        return SidecarState(status in LIVE, int(exit_code))

    async def healthcheck(self, name: str, sidecar: Sidecar) -> Healthcheck | None:
        if sidecar.healthcheck is not None or not sidecar.checks_health:
            return sidecar.healthcheck
        return image_healthcheck(json.dumps(self._images[name].healthcheck))

    async def passes(self, name: str, check: Healthcheck) -> bool:
        container = self._name_of(name)
        try:
            said = await exec_in(
                self._box, self._podman, container, check.command, timeout_s=check.timeout_s
            )
        except (NotFound, RetryHere):
            return False
        return said.code == 0

    def _log(self, name: str) -> Path:
        return self._box.path / f"sidecar.{name}.log"

    async def log(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = self._log(name).read_bytes()[-8192:].decode("utf-8", "replace").splitlines()
            # a line is `2026-11-28T21:37:41.3+00:00 stdout F the words`
            return "\n".join(line.split(" ", 3)[-1] for line in lines[-LOG_LINES:])
        return ""

    async def _call(self, command: Sequence[str], seconds: float = CALL_S) -> tuple[int, str]:
        """Exit code and both outputs as one text."""
        said = await _run(self._box, command, seconds)
        return said.code, (said.stdout + said.stderr).decode("utf-8", "replace").strip()


async def exec_in(
    box: SandboxFolder,
    podman: Sequence[str],
    container: str,
    argv: Sequence[str],
    *,
    user: str | None = None,
    timeout_s: float,
) -> SidecarResult:
    """Run a command in a sidecar, in the mount namespace that the container's folder is in: runc cannot
    enter it otherwise. Raises: NotFound if the container has ended; SandboxLost; RetryHere."""
    form = "{{.State.Status}} {{.State.ConmonPid}}"
    found = await _run(box, [*podman, "container", "inspect", "--format", form, container], CALL_S)
    if found.code != 0:
        raise SandboxLost(f"podman sandbox {box.identity!r} has ended: {found.stderr[-400:]!r}")
    status, monitor = found.stdout.decode().split()
    if status != "running":
        raise NotFound(f"the container {container} has ended")
    enter = [program("nsenter"), f"--mount=/proc/{monitor}/ns/mnt"]
    as_user = ["--user", user] if user else []
    said = await _run(box, [*enter, *podman, "exec", *as_user, container, *argv], timeout_s)
    if said.code == PODMAN_FAILED:
        raise RetryHere(f"podman exec in {container}: {said.stderr[-400:]!r}")
    return said


async def _run(box: SandboxFolder, command: Sequence[str], seconds: float) -> SidecarResult:
    """The variable lets a teardown find the process and end it."""
    process = await asyncio.create_subprocess_exec(
        *("/usr/bin/env", f"PERDURE_BOX={box.path}", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    except TimeoutError:
        raise RetryHere(f"podman {command[-1]} took more than {seconds:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    return SidecarResult(process.returncode or 0, out, err)


def shared_folder(box: SandboxFolder, name: str) -> Path:
    """On the disk of the sandbox, whose limit it shares."""
    return box.path / "disk" / f"shared.{name}"


def _mode(folder: SharedFolder) -> str:
    return "ro" if folder.read_only else "rw"


def _fill(folder: Path, root: str, target: str) -> str:
    """As Docker: the first container to mount an empty volume gives it its image's files. A path with a
    symbolic link could lead out of the image."""
    below = [Path(root, *Path(target).parts[1:at]) for at in range(2, len(Path(target).parts) + 1)]
    if any(path.is_symlink() for path in below) or not Path(root, target[1:]).is_dir():
        return ":"
    to, source = shlex.quote(str(folder)), shlex.quote(f"root{target}/.")
    return f'[ -n "$(ls -A {to})" ] || cp -a {source} {to}/'


def _argv(sidecar: Sidecar, config: Mapping[str, Any]) -> list[str]:
    """As Docker: an entrypoint replaces the image's command too."""
    entrypoint = sidecar.entrypoint
    own = config.get("Cmd") or () if entrypoint is None else ()
    begin = config.get("Entrypoint") or () if entrypoint is None else entrypoint
    return [*begin, *(own if sidecar.command is None else sidecar.command)]


def _variables(config: Mapping[str, Any]) -> Mapping[str, str]:
    pairs = (line.partition("=") for line in config.get("Env") or ())
    return {name: value for name, _, value in pairs}
