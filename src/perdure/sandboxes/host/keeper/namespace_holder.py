"""Becomes the holder, pid 1 of a sandbox's namespaces: mounts its disk, then executes `bwrap` or
another runtime.

Runs in a fork of the keeper.
"""

import fcntl
import os
import signal

from perdure.sandboxes.host.keeper import linux_syscalls
from perdure.sandboxes.host.keeper.command_launcher import FILTER
from perdure.sandboxes.host.keeper.sandbox_users import OwnUser


def become_holder(
    holder: dict[str, object], user: OwnUser | None, life: int, up: int, info: int
) -> None:
    """Mount what the runtime binds, in a mount namespace of its own, then execute the runtime."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    if holder["disk"]:
        _mount_disk(holder, user)
    given = [(life, 0), (up, 1), (info, 3), (_filter_file(), 4)]
    if user:
        given.append((user.namespace, 5))
    # first to numbers above the final ones, so that none overwrites another
    held = [(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 6), target) for fd, target in given]
    for fd, target in held:
        os.dup2(fd, target)
        os.set_inheritable(target, True)
    argv: list[str] = holder["own_argv" if user else "argv"]  # type: ignore[assignment]
    os.execve(argv[0], argv, {"PERDURE_BOX": os.getcwd()})


def _mount_disk(holder: dict[str, object], user: OwnUser | None) -> None:
    linux_syscalls.unshare(linux_syscalls.CLONE_NEWNS)
    linux_syscalls.mount("none", "/", "", linux_syscalls.MS_REC | linux_syscalls.MS_PRIVATE, "")
    if user:
        user.mount_over()
    linux_syscalls.mount(
        "tmpfs",
        "disk",
        "tmpfs",
        linux_syscalls.MS_NOSUID | linux_syscalls.MS_NODEV,
        str(holder["disk"]),
    )
    for name in ("upper", "work", "tree", "home", "shm", "tmp", "none"):
        os.mkdir(f"disk/{name}")
        if user:
            os.chown(f"disk/{name}", user.id, user.id)
    for path, options in holder["shared"].items():  # type: ignore[attr-defined]  # by keeper_client
        linux_syscalls.mount("overlay", path, "overlay", linux_syscalls.MS_RDONLY, options)
    if holder["overlay"]:
        linux_syscalls.mount("overlay", "disk/tree", "overlay", 0, str(holder["overlay"]))
    if holder["root"]:
        for name in ("root", "root.upper", "root.work"):
            os.mkdir(f"disk/{name}")
        linux_syscalls.mount("overlay", "disk/root", "overlay", 0, str(holder["root"]))


def _filter_file() -> int:
    """Pid 1 is filtered too: otherwise a process that traces it would escape the filter."""
    fd = os.memfd_create("filter")
    os.write(fd, FILTER)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
