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


def mount_points() -> list[str]:
    """Where something is mounted in this process's mount namespace."""
    with open("/proc/self/mountinfo", "rb") as file:
        escaped = [line.split()[4] for line in file]  # a blank is \040
    return [os.fsdecode(text.decode("unicode_escape").encode("latin1")) for text in escaped]


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


def runs(pid: int) -> bool:
    """Whether any of its threads is alive: the first one may have ended alone."""
    fields = stat(pid)
    return bool(fields) and (fields[0] not in b"ZX" or int(fields[17]) > 1)


def is_busy(pid: int) -> bool:
    """Whether any of its threads runs, or waits for a core or a disk."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    states = (read(f"/proc/{pid}/task/{thread}/stat") for thread in threads)
    return any(text[text.rfind(b")") + 2 :][:1] in (b"R", b"D") for text in states)


def depth(pid: int) -> int:
    """The number of pid namespaces it is in; 0 if it is gone."""
    for line in read(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(b"NSpid:"):
            return len(line.split()) - 1
    return 0


def children(pid: int) -> list[int]:
    """The children of all its threads."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue  # it ended, so its children have another parent now
    return found


def below(pid: int) -> list[int]:
    """Every descendant of `pid`, nearest first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found
