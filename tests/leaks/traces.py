"""What a stack can leave on this host, read from the kernel: nothing of ours is asked."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import uuid4

from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.cgroups import group_name
from perdure.sandboxes.host.sandbox_folder import DRAFT
from perdure.sandboxes.host.sandbox_teardown import REMOVAL_PREFIX

CGROUPS = Path("/sys/fs/cgroup")


class Traces:
    """Traces of every sandbox whose folder is below `home`. `see` remembers the live ones."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.groups: set[str] = set()
        self.networks: set[int] = set()
        """Inodes of network namespaces. The kernel may give a number again, to others too."""

    def boxes(self) -> list[Path]:
        """Folders of sandboxes, half-made and half-removed ones included."""
        found: list[Path] = []
        for root in (*self.home.glob("*/sandboxes/*"), *self.home.glob("*/*/sandboxes/*")):
            with contextlib.suppress(OSError):
                found += [Path(entry.path) for entry in os.scandir(root) if entry.is_dir()]
        return [p for p in found if p.name != ".locks" and ".etc-" not in p.name]

    def see(self) -> None:
        for box in self.boxes():
            self.groups.add(group_name(box))
        for pid in self.processes():
            with contextlib.suppress(OSError):
                self.networks.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        self.networks.discard(os.stat("/proc/self/ns/net").st_ino)

    def processes(self) -> list[int]:
        """Keepers, holders, launchers and commands: each has its sandbox's folder in its environment
        or as its folder."""
        return [pid for pid in _pids() if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        own = os.fsencode(self.home)
        with contextlib.suppress(OSError):
            box = b"PERDURE_BOX=" + own
            if box in Path(f"/proc/{pid}/environ").read_bytes():
                return True
            name = Path(f"/proc/{pid}/comm").read_bytes()
            folder = os.fsencode(os.readlink(f"/proc/{pid}/cwd"))
            return name.startswith(b"perdure-") and folder.startswith(own)
        return False

    def commands(self, mark: str) -> list[int]:
        """Processes with this word in their command line, inside sandboxes or not."""
        word = os.fsencode(mark)
        return [pid for pid in _pids() if word in procfs.read(f"/proc/{pid}/cmdline")]

    def cgroups(self) -> list[str]:
        return [path for path in _folders(CGROUPS) if os.path.basename(path) in self.groups]

    def mounts(self) -> list[str]:
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line for line in lines if str(self.home) in line or "/perdure-" in line]

    def held_networks(self) -> list[int]:
        """Our namespaces that still hold one of our processes, or that are bound to a file."""
        bound = {
            int(line.split("net:[")[1].split("]")[0])
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if "net:[" in line
        }
        inside = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                inside.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        return sorted(self.networks & (bound | inside))

    def left(self, mark: str) -> dict[str, list[object]]:
        """By kind, only what there is of it: {} = nothing."""
        found: dict[str, Iterable[object]] = {
            "boxes": self.boxes(),
            "processes": {pid: _what(pid) for pid in self.processes()}.items(),
            "commands": self.commands(mark),
            "cgroups": self.cgroups(),
            "mounts": self.mounts(),
            "networks": self.held_networks(),
        }
        return {kind: list(things) for kind, things in found.items() if list(things)}

    def age(self) -> None:
        """Renames what was half made or half removed, as if it came from before the last start of this
        host: then the next sweep removes it."""
        for path in self.boxes():
            for prefix in (DRAFT, REMOVAL_PREFIX):
                if path.name.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        path.rename(path.with_name(f"{prefix}aged-{uuid4().hex}"))


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _what(pid: int) -> bytes:
    return procfs.read(f"/proc/{pid}/comm") + procfs.read(f"/proc/{pid}/cmdline")[:200]


def _folders(root: Path) -> Iterator[str]:
    for where, names, _ in os.walk(root):
        for name in names:
            yield os.path.join(where, name)
