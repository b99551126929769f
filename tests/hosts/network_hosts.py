"""Hosts that this machine plays: each has a network, a process table, a host name, control groups and a
disk of its own. They meet on one bridge, whose first address is this machine's.

Each sees its disk at one common path and none of the others'. A host can be cut off, or lost with all
that runs on it. Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.checkout_paths import ROOT

CONTROLLERS = ("cpu", "cpuacct", "memory", "pids", "freezer", "unified")
GROUPS = Path("/sys/fs/cgroup")
ENDS_S = 60.0
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv")

UNSHARED = (
    *("unshare", "--net", "--mount", "--pid", "--uts", "--cgroup", "--fork"),
    *("--kill-child", "--mount-proc", "sh", "-c"),
)
JOIN = """
for procs in /sys/fs/cgroup/*/"$1"/cgroup.procs; do echo 0 > "$procs"; done
shift && exec "$@"
"""
"""First: its own cgroup namespace begins at the group it is in."""
BOOT = """
set -eu
name=$1 disk=$2 home=$3 group=$4 address=$5 link=$6
hostname "$name"
mount --bind "$disk" "$home"
mount -t tmpfs tmpfs "${disk%/*}"
for controller in cpu cpuacct memory pids freezer unified; do
    if [ -d "/sys/fs/cgroup/$controller/$group" ]; then
        mount --bind "/sys/fs/cgroup/$controller/$group" "/sys/fs/cgroup/$controller"
    fi
done
read -r go
ip link set lo up
ip link set "$link" name eth0
ip address add "$address/24" dev eth0
ip link set eth0 up
ip route add default via "${address%.*}.1"
echo up
exec sleep infinity
"""
RUN = """
for procs in /sys/fs/cgroup/*/cgroup.procs; do echo 0 > "$procs" || true; done 2>/dev/null
cd "$1" && shift && exec setpriv --pdeathsig KILL "$@"
"""


def why_not() -> str:
    """What this machine lacks to play hosts; empty: nothing."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not installed (Debian: apt-get install iproute2 util-linux)"
    return "" if os.geteuid() == 0 else "only root can make network namespaces"


@dataclass
class Host:
    """One host that runs."""

    name: str
    address: str
    disk: Path
    """Its home, as this machine sees it."""
    home: Path
    """Its home, as the host sees it: the same for all."""
    group: str
    link: str
    first: "subprocess.Popen[bytes]"
    """`unshare`; its child is the host's first process."""
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Of its first process, as this machine sees it."""
        [pid] = children(self.first.pid)
        return pid

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """A process of the host that dies with this one. Its log is `logs/<name>.log` of the disk."""
        logs = self.disk / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--uts"]
        enter += ["--cgroup", "--", "sh", "-c", RUN, "sh", str(ROOT), *argv]
        with (logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                enter, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env), cwd="/"
            )

    def stop(self, name: str, signum: int = signal.SIGTERM) -> None:
        """Signal one process and wait for its end."""
        process = self.processes.pop(name)
        for pid in children(process.pid):
            os.kill(pid, signum)
        process.wait(ENDS_S)

    def log(self, name: str, last: int = 2000) -> str:
        path = self.disk / "logs" / f"{name}.log"
        return path.read_text("utf-8", "replace")[-last:] if path.exists() else ""

    def cut(self) -> None:
        """Unplug it: nothing arrives, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")

    def lose(self) -> None:
        """kill -9 of all that runs on it. Its disk stays, as that of a machine without power."""
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(self.pid, signal.SIGKILL)
        self.first.wait(ENDS_S)
        for pipe in (self.first.stdin, self.first.stdout):
            if pipe is not None:
                pipe.close()
        for process in self.processes.values():
            process.wait(ENDS_S)
        self.processes.clear()
        _remove_groups(self.group)


@dataclass
class Network:
    """The bridge, and the hosts on it. Use `network()`."""

    folder: Path
    bridge: str
    prefix: str
    hosts: list[Host] = field(default_factory=list)
    _numbers: int = 1

    @property
    def outside(self) -> str:
        """The address of this machine, where the server, the store and the engine listen."""
        return f"{self.prefix}.1"

    def add(self, name: str) -> Host:
        """Boot a host with an empty disk, or with that of a lost one of this name."""
        self._numbers += 1
        group, link = f"{self.bridge}-{name}", f"{self.bridge}h{self._numbers}"
        disk, home = self.folder / "disks" / name, self.folder / "home"
        for folder in (disk, home):
            folder.mkdir(parents=True, exist_ok=True)
        for controller in CONTROLLERS:
            if (GROUPS / controller).is_dir():
                (GROUPS / controller / group).mkdir(exist_ok=True)
        inside = f"{link}i"
        _ip("link", "add", link, "type", "veth", "peer", "name", inside)
        _ip("link", "set", link, "master", self.bridge, "up")
        address = f"{self.prefix}.{self._numbers}"
        told = [name, str(disk), str(home), group, address, inside]
        first = subprocess.Popen(
            ["sh", "-c", JOIN, "sh", group, *UNSHARED, BOOT, "sh", *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        )
        host = Host(name, address, disk, home, group, link, first)
        # A lost one of this name had the same groups, which are this one's now.
        self.hosts[:] = [*(one for one in self.hosts if one.name != name), host]
        _wait(lambda: _own_network(first.pid) and len(children(first.pid)) == 1)
        _ip("link", "set", inside, "netns", str(first.pid))
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(b"go\n")
        first.stdin.flush()
        assert first.stdout.readline() == b"up\n", f"{name} did not boot"
        return host


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Nothing of it remains afterwards but the disks."""
    number = os.getpid() % 250 + 1
    bridge = f"pd{os.getpid() % 100_000}"
    found = Network(folder, bridge, f"10.213.{number}")
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("address", "add", f"{found.outside}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        with _forwarded(bridge):
            yield found
    finally:
        for host in found.hosts:
            host.lose()
        _ip("link", "del", bridge)


@contextmanager
def _forwarded(bridge: str) -> Iterator[None]:
    """Docker's daemon makes the kernel drop what passes over other bridges than its own."""
    if shutil.which("iptables") is None:
        yield
        return
    rule = ["FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT"]
    subprocess.run(["iptables", "--wait", "-I", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "--wait", "-D", *rule], check=True)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _remove_groups(group: str) -> None:
    """A group is busy for a moment while its last process ends."""
    for controller in CONTROLLERS:
        for folder, _, _ in os.walk(GROUPS / controller / group, topdown=False):
            _wait(partial(_removed, folder))


def _removed(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + ENDS_S
    while not condition():
        assert time.monotonic() < end, "this machine takes too long"
        time.sleep(0.02)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
