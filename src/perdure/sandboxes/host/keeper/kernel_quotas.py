"""Limits of a sandbox for what the kernel counts for the whole host or for a user."""

import os
import resource
from collections.abc import Mapping

from perdure.sandboxes.host.keeper import linux_syscalls

TERMINALS = 32
"""Pseudo-terminals of a sandbox. The host has `kernel.pty.max` minus a reserve: 3,072 by default."""
INOTIFY_INSTANCES = 16
"""Inotify instances of a sandbox. Its user may have `fs.inotify.max_user_instances` on the host,
128 by default."""

SHARES = {resource.RLIMIT_SIGPENDING: 1024, resource.RLIMIT_MSGQUEUE: 200 << 10}
"""Queued signals, and bytes in message queues, of a sandbox with a user namespace of its own."""
SHARES_OF_MANY = {resource.RLIMIT_MSGQUEUE: 0}
"""Limits of a sandbox without a user namespace. The kernel counts all sandboxes of its user together,
so a low limit would only be reached sooner. So it has no message queues, but signals for timers."""

_PTS = "/dev/pts"


def terminals_of(holder: int) -> str | None:
    """Options of the sandbox's own devpts; None if it has none. Read from outside its namespaces."""
    with open(f"/proc/{holder}/mountinfo") as file:
        for line in file:
            mount, _, system = line.partition(" - ")
            if mount.split()[4] == _PTS and system.startswith("devpts "):
                return system.split()[2]
    return None


def bound_terminals(options: str) -> None:
    """Limit terminals, from inside the sandbox's mount namespace. The devpts is its own."""
    kept = [part for part in options.split(",") if part not in ("rw", "ro") and "max=" not in part]
    flags = os.statvfs(_PTS).f_flag & linux_syscalls.MS_KEPT | linux_syscalls.MS_REMOUNT
    linux_syscalls.mount("none", _PTS, "", flags, ",".join([*kept, f"max={TERMINALS}"]))


def bound_inotify(settings: int) -> None:
    """Limit inotify, as root of the sandbox's user namespace. `settings`: the host's /proc/sys."""
    name = "user/max_inotify_instances"
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=settings)
    try:
        os.write(fd, str(INOTIFY_INSTANCES).encode())
    finally:
        os.close(fd)


def bound_user(shares: Mapping[int, int]) -> None:
    """Limit a command, from inside its user namespace."""
    for number, share in shares.items():
        hard = resource.getrlimit(number)[1]
        most = share if hard == resource.RLIM_INFINITY else min(share, hard)
        resource.setrlimit(number, (most, most))
