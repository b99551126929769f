"""The `bubblewrap` provider: own user, pid, ipc, uts, cgroup, mount and net namespaces.

`bwrap` boots pid 1 over an overlay of the tree and binds the host's programs, read-only.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

from perdure.sandboxes.agent_user import ENVIRONMENT, HOME, SYSTEM_PATH, USER_ID
from perdure.sandboxes.base import Mount, SandboxSpec
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.forward_proxy import proxy_variables
from perdure.sandboxes.host.keeper_client import Holder, start_keeper
from perdure.sandboxes.host.namespaces import (
    INIT,
    NamespaceProvider,
    NamespaceSandbox,
    disk_of,
    enforced,
    gateway_of,
    needs_user_namespace,
    overlay_option,
    proxy_of,
    resolver_of,
    shared_folders,
)
from perdure.sandboxes.host.root_folder import LINKED, host_programs
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.sandboxes.host.sandbox_programs import missing_programs, program
from perdure.sandboxes.spec_validation import check_folders

OVERLAYS_MAP_OWNERS = (5, 19)
"""The first Linux version whose overlays show mapped owners."""
WORKERS_USER = ("--unshare-user", "--uid", str(USER_ID), "--gid", str(USER_ID))
"""Commands and pid 1 run as the worker's user."""
OWN_USER = (
    *("--userns", "5", "--uid", "0", "--gid", "0"),
    *("--cap-drop", "ALL", "--cap-add", "CAP_KILL", "--cap-add", "CAP_DAC_READ_SEARCH"),
)
"""Instead, if the sandbox has its own user. Pid 1 is root inside, because it kills processes of
another user, `agent`, and enters the workdir, which `agent` owns and may close to others."""


class BubblewrapProvider(NamespaceProvider):
    """The default on one machine: works as root and as an ordinary user."""

    name = "bubblewrap"

    def check(self) -> Sequence[str]:
        missing = missing_programs(("bwrap", "mount", "unshare"))
        if not missing and (refusal := _refusal()):
            missing.append(refusal)
        return missing

    async def _boot(self, spec: SandboxSpec, box: SandboxFolder) -> NamespaceSandbox:
        check_folders(spec)
        plan = cgroups.plan(box.path, spec.limits)
        meta = self._meta(
            spec,
            box,
            plan,
            workdir=spec.workdir,
            env={**ENVIRONMENT, **proxy_variables(spec.network, spec.sidecars), **spec.env},
            enforced=enforced(plan, spec),
        )
        box.create_folder(meta, spec.ttl_s)
        holder = self._with_own_user(
            spec,
            Holder(
                tuple(self.command(spec, box)),
                *disk_of(spec),
                shared=shared_folders(spec, self._etc),
                kills=True,
            ),
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

    def _with_own_user(self, spec: SandboxSpec, holder: Holder) -> Holder:
        """Give the sandbox its own user if this process is root and overlays show mapped owners."""
        first = self.settings.sandbox.user_ids
        if not first or os.geteuid() or needs_user_namespace() or _kernel() < OVERLAYS_MAP_OWNERS:
            return holder
        at = holder.argv.index(WORKERS_USER[0])
        own = (*holder.argv[:at], *OWN_USER, *holder.argv[at + len(WORKERS_USER) :])
        paths = [*([spec.tree] if spec.tree else []), *(mount.source for mount in spec.mounts)]
        return replace(
            holder, own_argv=own, user_ids=first, paths=tuple(dict.fromkeys(map(str, paths)))
        )

    def command(self, spec: SandboxSpec, box: SandboxFolder) -> list[str]:
        """The `bwrap` command that makes this sandbox once its disk is mounted."""
        return _bwrap(spec, box, self._etc)


# -- the command that the keeper runs ---------------------------------------------------------------


def _bwrap(spec: SandboxSpec, box: SandboxFolder, etc: Path) -> list[str]:
    disk = box.path / "disk"
    resolver = resolver_of(spec.network)
    share = [] if resolver else ["--unshare-net"]
    own = (
        *_bind(disk / "tmp", "/tmp", writable=True),
        *_bind(disk / "home", HOME, writable=True),
        *_bind(disk / "shm", "/dev/shm", writable=True),
        *_bind(disk / "tree", spec.workdir, writable=True),
    )
    return [
        *(program("bwrap"), *WORKERS_USER, "--unshare-ipc", "--unshare-pid", "--unshare-uts"),
        *("--unshare-cgroup-try", *share, "--hostname", "sandbox"),
        *(
            "--as-pid-1",
            "--die-with-parent",
            "--new-session",
            "--clearenv",
            "--setenv",
            "PATH",
            SYSTEM_PATH,
            "--info-fd",
            "3",
            "--seccomp",
            "4",
        ),
        *_base(),
        *_bind(etc, "/etc"),
        *(_bind(resolver, "/etc/resolv.conf") if resolver else ()),
        *("--proc", "/proc", "--dev", "/dev", "--dir", "/run", "--dir", "/var"),
        *(
            "--symlink",
            "/tmp",
            "/var/tmp",
            *own,
            "--chmod",
            "1777",
            "/dev/shm",
            "--chmod",
            "1777",
            "/tmp",
        ),
        *_mount_binds(spec.mounts),
        *("--remount-ro", "/"),  # the launcher seals /proc and /dev
        *("--chdir", spec.workdir, "--", *INIT),
    ]


def _bind(source: Path, target: str, *, writable: bool = False) -> tuple[str, ...]:
    """Also makes the folders above `target`, which bwrap would close to all users but root."""
    folders = [str(folder) for folder in reversed(PurePosixPath(target).parents)][1:]
    above = (part for folder in folders for part in ("--dir", folder))
    return (*above, "--bind" if writable else "--ro-bind", str(source), target)


@cache
def _base() -> tuple[str, ...]:
    """The host's programs and libraries, and this Python."""
    binds = [
        part
        for mount in host_programs()
        if os.access(mount.source, os.R_OK | os.X_OK)
        for part in _bind(mount.source, mount.target)
    ]
    for name in LINKED:
        path = Path("/", name)
        if path.is_symlink():
            binds += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            binds += _bind(path, str(path))
    return tuple(binds)


def _mount_binds(mounts: Iterable[Mount]) -> list[str]:
    binds: list[str] = []
    for mount in sorted(mounts, key=lambda mount: mount.target.count("/")):
        binds += _bind(mount.source, mount.target, writable=mount.writable)
    return binds


# -- what this host allows ------------------------------------------------------------------------


def _refusal() -> str | None:
    """Try the namespaces and the overlay once. If they are refused, the reason in one line."""
    users = ["--user", "--map-root-user"] if needs_user_namespace() else []
    extra = overlay_option()
    script = (
        "cd /tmp && mount -t tmpfs tmpfs /tmp && mkdir /tmp/l /tmp/u /tmp/w /tmp/t && "
        f"mount -t overlay -o lowerdir=/tmp/l,upperdir=/tmp/u,workdir=/tmp/w,{extra} o /tmp/t && "
        "bwrap --unshare-all --ro-bind / / --proc /proc --dev /dev true"
    )
    argv = [program("unshare"), *users, "--mount", "--propagation", "private", "sh", "-c", script]
    tried = subprocess.run(argv, capture_output=True, check=False, env={"PATH": SYSTEM_PATH})
    if tried.returncode == 0:
        return None
    words = tried.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no reason given"]
    return f"bubblewrap cannot make a sandbox: {words[0]}; {_fix()}"


@cache
def _kernel() -> tuple[int, ...]:
    """`6.1.0-13-amd64` -> (6, 1)."""
    return tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))


def _fix() -> str:
    for name, wanted in (
        ("kernel/unprivileged_userns_clone", "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "0"),
    ):
        path = Path("/proc/sys", name)
        if path.exists() and path.read_text().strip() != wanted:
            return f"enable user namespaces: sysctl -w {name.replace('/', '.')}={wanted}"
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.exists() and limit.read_text().strip() == "0":
        return "enable user namespaces: sysctl -w user.max_user_namespaces=15000"
    return "bubblewrap needs user namespaces and overlayfs (Linux 5.11 or later), inside containers too"
