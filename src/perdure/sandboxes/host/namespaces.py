"""What `bubblewrap`, `podman` and `apptainer` share: sandboxes whose pid 1 holds namespaces.

The holder is pid 1 of the namespaces. Its disk is a tmpfs; the tree is the lower layer of an overlay
on it. All mounts are in the holder's mount namespace and end with it.
"""

import os
import re
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

from perdure.sandboxes.base import Network, SandboxSpec
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.forward_proxy import PROXY_PORT
from perdure.sandboxes.host.host_sandbox import PIDS, HostSandbox
from perdure.sandboxes.host.procfs import mount_points
from perdure.sandboxes.host.provider import HostProvider
from perdure.sandboxes.host.root_folder import LINKED, etc_digest, host_programs, write_etc
from perdure.sandboxes.host.sandbox_folder import SandboxFolder, SandboxMeta
from perdure.sandboxes.host.untrusted_files import read_file, write_file
from perdure.types import Limits

GATEWAY_PORT = 18001
"""Where commands reach the gateway, on the sandbox's own loopback."""
CAP_SYS_ADMIN = 21
LEAST_INODES, INODES_PER_MB = 1 << 15, 256

INIT = (
    "/bin/bash", "--norc", "-c",
    "echo up; exec >/dev/null 2>&1; while read -r line; do kill -KILL -1; echo >&0; done",
)  # fmt: skip
"""Pid 1: a bash, which reaps orphans while it waits for input (dash does not). For each line that
it reads, it kills every other process at once and answers with a line. No process can kill it. It
exits when its input ends, which is when the keeper exits. `--norc`: with a socket as its input,
bash would read ~/.bashrc."""


class NamespaceSandbox(HostSandbox):
    """Namespaces held by pid 1, into which its launcher forks the commands."""

    def __init__(self, box: SandboxFolder, meta: SandboxMeta) -> None:
        super().__init__(box, meta)
        self.proxy_socket = proxy_socket(box)

    def _folder(self, cwd: str | None) -> str | None:
        return None if cwd == self.workdir else cwd

    async def put(self, path: str, data: bytes | Path, *, mode: int = 0o644) -> None:
        await write_file(self._root(), self._absolute(path), data, mode, self._user)

    async def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        return await read_file(self._root(), self._absolute(path), offset, limit)

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}"

    def _root(self) -> Path:
        self._check_alive()
        _, holder = self._processes
        if holder is None:
            raise self._lost()
        return Path(f"/proc/{holder.pid}/root")


class NamespaceProvider(HostProvider):
    """Its sandboxes reach the gateway and the proxy through forwarders of their keeper."""

    networks = frozenset(Network)

    def _handle(self, box: SandboxFolder, meta: SandboxMeta) -> NamespaceSandbox:
        return NamespaceSandbox(box, meta)

    @cached_property
    def _etc(self) -> Path:
        """The sandbox's /etc, copied once per state of the host's: one bind instead of thirty."""
        return self._made_once(f".etc-{etc_digest()}", write_etc)


def gateway_of(spec: SandboxSpec) -> tuple[int, Path] | None:
    """The port that the keeper's forwarder listens on, and the socket it connects to."""
    return None if spec.gateway is None else (GATEWAY_PORT, spec.gateway)


def proxy_of(spec: SandboxSpec, box: SandboxFolder) -> tuple[int, Path] | None:
    """The port and the socket of the proxy to listed hosts; None if the phase lists no host."""
    return (PROXY_PORT, proxy_socket(box)) if spec.network is Network.LISTED else None


def proxy_socket(box: SandboxFolder) -> Path:
    return box.path / "proxy"


def disk_of(spec: SandboxSpec) -> tuple[str, str | None]:
    """Mount options of the tmpfs, and of the overlay on it if there is a tree."""
    disk = disk_size(spec.limits)
    if spec.tree is None:
        return disk, None
    overlay = f"lowerdir={spec.tree},upperdir=disk/upper,workdir=disk/work"
    return disk, f"{overlay},{overlay_option()}"


def disk_size(limits: Limits) -> str:
    """Mount options of a tmpfs."""
    inodes = max(LEAST_INODES, limits.disk_mb * INODES_PER_MB)  # each costs kernel memory
    return f"size={limits.disk_mb}m,nr_inodes={inodes},mode=0755"


def shared_folders(spec: SandboxSpec, etc: Path) -> Mapping[str, str]:
    """Each folder that this sandbox has in common with others -> mount options of its own overlay
    over it. An overlay hides what is mounted below its folder, so such a folder gets none."""
    given = (os.path.realpath(mount.source) for mount in spec.mounts if not mount.writable)
    sources = {*given, *(() if spec.image else (*_programs(), str(etc)))}
    points, chosen = mount_points(), list[str]()
    for path in sorted(sources):  # a folder comes before those in it
        covered = any(path.startswith(f"{folder}/") for folder in chosen)
        if not covered and _is_readable(path) and not any(p.startswith(f"{path}/") for p in points):
            chosen.append(path)
    user = ",userxattr" if needs_user_namespace() else ""
    return {path: f"lowerdir={_escaped(path)}:disk/none{user}" for path in chosen}


def _escaped(path: str) -> str:
    """A path in the options of an overlay: a colon would end it, and a comma the option."""
    return re.sub(r"([\\:,])", r"\\\1", path)


@cache
def _programs() -> tuple[str, ...]:
    paths = [*(mount.source for mount in host_programs()), *(Path("/", name) for name in LINKED)]
    return tuple(map(os.path.realpath, paths))


def _is_readable(folder: str) -> bool:
    return os.access(folder, os.R_OK | os.X_OK) and os.path.isdir(folder)


def overlay_option() -> str:
    """`redirect_dir`: without it a folder of the tree can be copied, but not renamed."""
    return "userxattr" if needs_user_namespace() else "redirect_dir=on"


def resolver_of(network: Network) -> Path | None:
    """The host's resolv.conf, for sandboxes that share its network."""
    return Path(os.path.realpath("/etc/resolv.conf")) if network is Network.HOST else None


def enforced(plan: cgroups.Plan, spec: SandboxSpec) -> Mapping[str, str]:
    """Limit -> the mechanism that enforces it."""
    fallback = {
        "memory": f"prlimit --data={spec.limits.memory_mb << 20}",
        "pids": f"{PIDS}{spec.limits.pids}",
        "cpu": "none",
        "disk": "tmpfs",
        "output": "watched",
    }
    return {**fallback, **plan.enforced}


@cache
def needs_user_namespace() -> bool:
    """True when this process may not mount: then the keeper becomes root of a user namespace."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return not int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1
