"""The `bubblewrap` provider: own user, pid, ipc, uts, cgroup, mount and net namespaces.

Boots a holder (pid 1 of the namespaces) over an overlay of the tree; every command is born in
them from its launcher. All mounts live in the holder's mount namespace and die with it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from uuid import uuid4

from perdure.errors import ConfigurationError, MissingDependency
from perdure.sandboxes.base import Mount, Network, PortStream, SandboxSpec
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.box import DRAFT, Box, BoxMeta
from perdure.sandboxes.host.dialling import dial_into
from perdure.sandboxes.host.files import read_file, write_file
from perdure.sandboxes.host.keeper.keeper import DEVICES
from perdure.sandboxes.host.keeper.launcher import TOLD_TO_ROOT
from perdure.sandboxes.host.keepers import SYSTEM_PATH, Holder, start_keeper
from perdure.sandboxes.host.sandbox import HostProvider, HostSandbox, program

USER_ID = 1000
HOME = "/home/agent"
GATEWAY_PORT = 18001
CAP_SYS_ADMIN = 21
LEAST_INODES, INODES_PER_MB = 1 << 15, 256

ENVIRONMENT = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "LOGNAME": "agent",
    "PATH": SYSTEM_PATH,
    "SHELL": "/bin/bash",
    "USER": "agent",
}

ETC = {
    "group": f"root:x:0:\nagent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "",
    "passwd": (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"agent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
}
"""Written by us. Everything else of /etc is the host's only where it is named below."""

ETC_OF_HOST = (
    "alternatives", "ca-certificates", "crypto-policies", "debian_version", "gai.conf",
    "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "magic", "mime.types", "os-release", "perl", "pki/ca-trust",
    "pki/tls/certs", "protocols", "python3", f"python3.{sys.version_info.minor}", "redhat-release",
    "services", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip

# pid 1: bash reaps what is orphaned while it waits, without any process to wait for (dash does not);
# no line ever comes in, and the end of them comes with the keeper's
INIT = "echo up; exec >/dev/null; while read -r line; do :; done"


class BubblewrapSandbox(HostSandbox):
    """Namespaces held by pid 1, into which its launcher forks the commands."""

    def _folder(self, cwd: str | None) -> str | None:
        return None if cwd == self.workdir else cwd

    async def put(self, path: str, data: bytes | Path, *, mode: int = 0o644) -> None:
        await write_file(self._root(), self._absolute(path), data, mode)

    async def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        return await read_file(self._root(), self._absolute(path), offset, limit)

    async def dial(self, port: int) -> PortStream:
        self._check_alive()
        _, holder = self._processes
        if holder is None:
            raise self._lost()
        return await dial_into(holder, port)

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}"

    def _root(self) -> Path:
        self._check_alive()
        _, holder = self._processes
        if holder is None:
            raise self._lost()
        return Path(f"/proc/{holder.pid}/root")


class BubblewrapProvider(HostProvider):
    """The default on one machine: works as root and as an ordinary user."""

    name = "bubblewrap"
    dials = True

    def check(self) -> Sequence[str]:
        missing = []
        for name in ("bwrap", "mount", "unshare"):
            try:
                program(name)
            except MissingDependency as error:
                missing.append(str(error))
        if not missing and (refusal := _refusal()):
            missing.append(refusal)
        return missing

    async def _boot(self, spec: SandboxSpec, box: Box) -> BubblewrapSandbox:
        check_spec(spec)
        plan = cgroups.plan(box.path, spec.limits)
        meta = self._meta(
            spec,
            box,
            plan,
            workdir=spec.workdir,
            env={**ENVIRONMENT, **spec.env},
            enforced=enforced(plan, spec),
        )
        box.lay_out(meta, spec.ttl_s)
        gateway = None if spec.gateway is None else (GATEWAY_PORT, spec.gateway)
        holder = Holder(tuple(self.command(spec, box)), *disk_of(spec))
        await start_keeper(box, plan, holder, gateway, as_root_of_own=_needs_own_users())
        return self._handle(box, meta)

    def command(self, spec: SandboxSpec, box: Box) -> list[str]:
        """How `bwrap` makes this sandbox, once its disk is mounted."""
        return _bwrap(spec, box, self._etc)

    def _handle(self, box: Box, meta: BoxMeta) -> BubblewrapSandbox:
        return BubblewrapSandbox(box, meta)

    @cached_property
    def _etc(self) -> Path:
        """The sandbox's /etc, made once per state of the host's: one bind instead of thirty."""
        folder = self.root / f".etc-{_etc_stamp()}"
        if not folder.exists():
            draft = self.root / f"{DRAFT}{uuid4().hex}"
            _write_etc(draft)
            try:
                draft.rename(folder)
            except OSError:  # another process was quicker
                shutil.rmtree(draft)
        return folder


# -- what the keeper boots ------------------------------------------------------------------------


def disk_of(spec: SandboxSpec) -> tuple[str, str | None]:
    """Options of the tmpfs, and of the overlay on it where there is a tree."""
    inodes = max(LEAST_INODES, spec.limits.disk_mb * INODES_PER_MB)  # each costs kernel memory
    disk = f"size={spec.limits.disk_mb}m,nr_inodes={inodes},mode=0755"
    if spec.tree is None:
        return disk, None
    # without redirects a folder of the tree cannot be renamed, only copied
    extra = "userxattr" if _needs_own_users() else "redirect_dir=on"
    return disk, f"lowerdir={spec.tree},upperdir=disk/upper,workdir=disk/work,{extra}"


def _bwrap(spec: SandboxSpec, box: Box, etc: Path) -> list[str]:
    disk = box.path / "disk"
    share = ["--share-net"] if spec.network is Network.HOST else []
    who = ["--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox"]
    own = (
        *_bind(disk / "tmp", "/tmp", writable=True),
        *_bind(disk / "home", HOME, writable=True),
        *_bind(disk / "shm", "/dev/shm", writable=True),
        *_bind(disk / "tree", spec.workdir, writable=True),
    )
    return [
        *(program("bwrap"), "--unshare-all", "--unshare-user", *share, *who),
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
        *_resolver(spec.network),
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
        *_hidden(),
        # the host's kernel settings and devices: root's are agent's, where the worker is root
        *(part for name in DEVICES for part in _device(disk / "dev" / name, name)),
        *("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", spec.workdir, "--", "/bin/bash", "-c", INIT),
    ]


def _bind(source: Path, target: str, *, writable: bool = False) -> tuple[str, str, str]:
    return ("--bind" if writable else "--ro-bind", str(source), target)


def _device(source: Path, name: str) -> tuple[str, str, str]:
    return ("--dev-bind", str(source), f"/dev/{name}")


@cache
def _base() -> tuple[str, ...]:
    """The host's programs and libraries, and this Python where it lives outside /usr."""
    binds = [*_bind(Path("/usr"), "/usr")]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            binds += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            binds += _bind(path, str(path))
    for prefix in dict.fromkeys((sys.base_prefix, os.path.realpath(sys.base_prefix))):
        outside = not prefix.startswith("/usr/") and prefix != "/usr"
        if outside and os.access(prefix, os.R_OK | os.X_OK):
            binds += _bind(Path(prefix), prefix)
    return tuple(binds)


@cache
def _hidden() -> tuple[str, ...]:
    found = (Path("/proc", name) for name in TOLD_TO_ROOT)
    return tuple(
        part for path in found if path.exists() for part in _bind(Path("/dev/null"), str(path))
    )


def _resolver(network: Network) -> Sequence[str]:
    if network is Network.NONE:
        return ()
    return _bind(Path(os.path.realpath("/etc/resolv.conf")), "/etc/resolv.conf")


def _etc_stamp() -> str:
    names = [Path("/etc", name) for name in ETC_OF_HOST]
    state = [(str(path), path.stat().st_mtime_ns) for path in names if path.exists()]
    return hashlib.sha256(repr((state, ETC)).encode()).hexdigest()[:16]


def _write_etc(folder: Path) -> None:
    folder.mkdir(mode=0o755, parents=True)
    for name in ETC_OF_HOST:
        path, copy = Path("/etc", name), folder / name
        copy.parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy, symlinks=True, ignore_dangling_symlinks=True)
        elif path.exists():
            shutil.copy2(path, copy, follow_symlinks=name != "localtime")
    for name, text in ETC.items():
        (folder / name).write_text(text)


def _mount_binds(mounts: Iterable[Mount]) -> list[str]:
    binds: list[str] = []
    for mount in sorted(mounts, key=lambda mount: mount.target.count("/")):
        binds += _bind(mount.source, mount.target, writable=mount.writable)
    return binds


def check_spec(spec: SandboxSpec) -> None:
    for target in (spec.workdir, *(mount.target for mount in spec.mounts)):
        if not target.startswith("/") or target == "/":
            raise ConfigurationError(f"{target!r} is no absolute path below /; give one")
    for mount in spec.mounts:
        if not mount.source.is_absolute() or not mount.source.exists():
            raise ConfigurationError(f"mount source {str(mount.source)!r} is no existing path")
    if spec.tree is not None and not spec.tree.is_dir():
        raise ConfigurationError(f"tree {str(spec.tree)!r} is no folder")
    if spec.tree is not None and (
        set(str(spec.tree)) & set(',:\\"') or not spec.tree.is_absolute()
    ):
        raise ConfigurationError(
            f"tree {str(spec.tree)!r} must be absolute, without comma, colon, quote or backslash"
        )


def enforced(plan: cgroups.Plan, spec: SandboxSpec) -> Mapping[str, str]:
    """Limit -> mechanism. The kernel exempts root's processes from the pids rlimit."""
    fallback = {
        "memory": f"prlimit --data={spec.limits.memory_mb << 20}",
        "pids": f"prlimit --nproc={spec.limits.pids}" if os.geteuid() else "none",
        "cpu": "none",
        "disk": "tmpfs",
        "output": "watched",
    }
    return {**fallback, **plan.enforced}


# -- what this host allows ------------------------------------------------------------------------


@cache
def _own_status() -> str:
    return Path("/proc/self/status").read_text()


@cache
def _needs_own_users() -> bool:
    """True when this process may not mount: then the keeper becomes root of a user namespace."""
    line = next(line for line in _own_status().splitlines() if line.startswith("CapEff:"))
    return not int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1


def _refusal() -> str | None:
    """Try the namespaces and the overlay once; the reason in one line where they are refused."""
    users = ["--user", "--map-root-user"] if _needs_own_users() else []
    extra = "userxattr" if users else "redirect_dir=on"
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
    return "it needs user namespaces and overlayfs (Linux 5.11 or later), also inside containers"
