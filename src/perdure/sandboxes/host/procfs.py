"""Reads /proc about processes of this host. Imports almost nothing, because keepers use it too."""

import os


def read(path: str) -> bytes:
    """At most 4096 bytes, without a file object: waiting for a command calls this often."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    try:
        return os.read(fd, 4096)
    except ProcessLookupError:  # it ended between open and read
        return b""
    finally:
        os.close(fd)


def stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third (the state) on; empty if the process is gone."""
    text = read(f"/proc/{pid}/stat")
    return text[text.rfind(b")") + 2 :].split()


def started_at(pid: int) -> int:
    """Start time of a process, in clock ticks since boot; 0 if it is gone."""
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def marked(marker: bytes) -> list[int]:
    """Pids of processes whose environment has exactly this `NAME=value`."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _holds(name, marker)]


def _holds(pid: str, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """Every descendant of `pid`, nearest first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as file:
                children = [int(child) for child in file.read().split()]
        except OSError:
            continue
        found += children
        queue += children
    return found
