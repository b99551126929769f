"""The `docker run` command of one sandbox, by what the engine can do."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.errors import ConfigurationError
from perdure.sandboxes.agent_user import HOME
from perdure.sandboxes.base import Mount, Network, SandboxSpec
from perdure.sandboxes.guest.container_options import CAPABILITIES, ROOT, init_command
from perdure.sandboxes.guest.guest_sandbox import FOLDER
from perdure.sandboxes.host.keeper.kernel_quotas import TERMINALS
from perdure.sandboxes.providers.docker import docker_cli
from perdure.settings.settings_tree import Settings
from perdure.types import SharedFolder
from perdure.types.containers import host_names

SPARE_PIDS = 32
"""Added to the pids limit, so that the guest can run when commands have used up the limit."""

TERMINALS_FOLDER = (
    "type=volume,dst=/dev/pts,volume-driver=local,volume-opt=type=devpts,volume-opt=device=devpts,"
    f'"volume-opt=o=newinstance,ptmxmode=0666,mode=0620,gid=5,max={TERMINALS},nosuid,noexec"'
)
"""Docker has no option for the number of pseudo-terminals, but its volumes may be any file system.
Other runtimes have a kernel, and so terminals, of their own."""
PROXY_FOLDER = f"{FOLDER}/proxy"
"""Where a container has the folder of its proxy's socket. Only its first process can enter FOLDER."""


@dataclass(frozen=True)
class DockerEngine:
    """What the engine can do, as its first `docker info` reports."""

    binds: bool
    """It sees this host's folders under the same paths."""
    limits: Mapping[str, str]
    """Limit -> the mechanism that enforces it, or `none`."""


def engine_of(info: Mapping[str, Any], *, here: bool) -> DockerEngine:
    """`info`: what `docker info` says. With this host's kernel and name, the engine sees its folders."""
    own = os.uname()
    same = (info.get("Name"), info.get("KernelVersion")) == (own.nodename, own.release)
    version = f"cgroup v{info.get('CgroupVersion') or 1}"
    limits = {
        "memory": version if info.get("MemoryLimit") else "none",
        "pids": version if info.get("PidsLimit") else "none",
        "cpu": version if info.get("CpuCfsQuota", info.get("CPUCfsQuota")) else "none",
    }
    return DockerEngine(binds=here and same, limits=limits)


def agent_user() -> str:
    """The worker's ids, but never root's, so that commands can read bound files that only the
    worker may read."""
    return f"{os.getuid()}:{os.getgid()}" if os.getuid() else "1000:1000"


def run_command(
    spec: SandboxSpec,
    name: str,
    image: str,
    labels: Mapping[str, str],
    engine: DockerEngine,
    *,
    settings: Settings,
    proxy: Path | None,
) -> list[str]:
    """The `docker run` of one sandbox. The root folder of an instance's own image is writable.
    `proxy`: the socket of the proxy to listed hosts."""
    network, runtime = settings.docker.network or "none", settings.docker.runtime
    files = settings.sandbox.open_files
    owner = ROOT if spec.image else agent_user()
    folders = [HOME, *([] if spec.image else ["/tmp"])]
    if not spec.image and any(mount.target.startswith("/root/") for mount in spec.mounts):
        folders.append("/root")  # only root can enter the image's own /root
    if spec.tree is not None or spec.image is None:
        folders.append(spec.workdir)
    limits = spec.limits
    names = host_names(spec.sidecars) if spec.sidecars else ()
    return [
        *("run", "--detach", "--name", name, "--hostname", "sandbox", "--user", ROOT),
        *("--pull", "never"),
        *("--network", "host" if spec.network is Network.HOST else network, "--log-driver", "none"),
        *(("--runtime", runtime) if runtime else ()),
        *(part for key, value in labels.items() for part in docker_cli.with_label(key, value)),
        *("--security-opt", "no-new-privileges", "--cap-drop", "ALL"),
        *(part for capability in CAPABILITIES for part in ("--cap-add", capability)),
        *("--ulimit", f"nofile={files}:{files}", "--ulimit", "core=0:0"),
        *("--ulimit", "msgqueue=0:0"),  # message queues are counted for all containers of the user
        *(() if runtime else ("--mount", TERMINALS_FOLDER)),
        *_limits(spec, engine),
        *(("--read-only",) if engine.binds and not spec.image else ()),
        *("--volume", FOLDER, "--shm-size", f"{limits.disk_mb}m"),
        *(part for folder in folders for part in ("--tmpfs", _disk(spec, folder, owner))),
        *(part for mount in spec.mounts if engine.binds for part in ("--volume", _volume(mount))),
        *folder_options(name, spec.folders),
        *(("--volume", f"{proxy.parent}:{PROXY_FOLDER}:ro") if proxy else ()),
        *(part for host in names for part in ("--add-host", f"{host}:127.0.0.1")),
        *("--workdir", "/", "--env", f"PERDURE_OWNER={owner}", "--entrypoint", "python3"),
        *(image, *init_command(spec.ttl_s, proxy=f"{PROXY_FOLDER}/{proxy.name}" if proxy else "")),
    ]


def build_network_command(name: str, image: str, proxy: Path, seconds: float) -> list[str]:
    """The `docker run` of a container whose network has only a port that leads to the socket `proxy`.
    It ends after so many seconds."""
    inside = f"{PROXY_FOLDER}/{proxy.name}"
    return [
        *("run", "--detach", "--rm", "--name", name, "--user", ROOT, "--pull", "never"),
        *("--network", "none", "--log-driver", "none", "--read-only", "--volume", FOLDER),
        *("--security-opt", "no-new-privileges", "--cap-drop", "ALL"),
        *(part for capability in CAPABILITIES for part in ("--cap-add", capability)),
        *("--memory", "128m", "--pids-limit", str(SPARE_PIDS)),
        *("--volume", f"{proxy}:{inside}:ro", "--entrypoint", "python3"),
        *(image, *init_command(seconds, proxy=inside)),
    ]


def folder_options(sandbox: str, folders: Iterable[SharedFolder]) -> list[str]:
    """Mounts of volumes, which the engine makes at their first use. `sandbox`: its container."""
    return [
        f"--volume={sandbox}.{one.name}:{one.target}:{'ro' if one.read_only else 'rw'}"
        for one in folders
    ]


def _limits(spec: SandboxSpec, engine: DockerEngine) -> list[str]:
    limits, command = spec.limits, list[str]()
    if engine.limits["memory"] != "none":
        command += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if engine.limits["pids"] != "none":
        command += ["--pids-limit", str(limits.pids + SPARE_PIDS)]
    if engine.limits["cpu"] != "none":
        command += ["--cpus", f"{limits.cpus:g}"]
    return command


def _disk(spec: SandboxSpec, folder: str, owner: str) -> str:
    uid, _, gid = owner.partition(":")
    mode = "1777" if folder == "/tmp" else "0755"
    size = f"size={spec.limits.disk_mb}m,nr_inodes={max(1 << 15, spec.limits.disk_mb * 256)}"
    return f"{folder}:{size},mode={mode},uid={uid},gid={gid},exec,nosuid,nodev"


def _volume(mount: Mount) -> str:
    if ":" in f"{mount.source}{mount.target}":
        raise ConfigurationError(f"mount {str(mount.source)!r} holds a colon; rename the folder")
    return f"{mount.source}:{mount.target}:ro"
