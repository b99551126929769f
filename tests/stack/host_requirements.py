"""What this host has, and what runs on it: processes, folders, missing programs."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings


def why_not_here() -> str:
    """What this machine lacks for a stack, for a skip; empty = nothing."""
    missing = (
        []
        if shutil.which("setpriv")
        else ["setpriv is missing (Debian: apt-get install util-linux)"]
    )
    return "; ".join([*missing, *BubblewrapProvider(Settings(home=Path("/nonexistent"))).check()])


def pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def comm(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return b""


def parents(pid: int) -> Iterator[int]:
    """Its parent, that one's parent, and so on."""
    while pid:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return
        yield pid


def started_at(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0


def folders(root: Path, depth: int = 1) -> list[Path]:
    """Folders below `root`, down to `depth` levels; what vanishes meanwhile is left out."""
    found: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append(Path(entry.path))
                if depth > 1:
                    found += folders(Path(entry.path), depth - 1)
    return found
