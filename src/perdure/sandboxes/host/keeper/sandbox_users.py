"""A host user for one sandbox, so that what the kernel counts per user it counts per sandbox.

Only a keeper that is root can make one. The keeper locks the id for its lifetime, so the id is free
again however the keeper ends. Inside, mounted files of the host's root belong to `agent`.
"""

import fcntl
import os

from perdure.sandboxes.agent_user import USER_ID
from perdure.sandboxes.host.keeper import kernel_quotas, linux_syscalls

IDS = 1 << 16
LOCKS = "/run/perdure-user-ids"
"""The keeper that has the Nth id locks byte N. All homes on this host share the file."""


class OwnUser:
    """The sandbox's user: `id` on the host, and the user `namespace` in which it is `agent`."""

    def __init__(self, first: int, paths: list[str]) -> None:
        """`first`: the lowest host id to choose from. `paths`: what the sandbox mounts.

        Raises: OSError if no id is free, or the kernel cannot map the owners of a path's files, as
        on overlayfs and NFS.
        """
        self.id = first + _claim()
        self._mounts: list[tuple[str, int]] = []
        self.namespace, owners = _namespaces(self.id)
        try:
            for path in paths:
                self._mounts.append((path, linux_syscalls.copy_of_mount(path, owners)))
        except OSError as error:
            self.close()
            raise OSError(f"owners of {path} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(owners)

    def mount_over(self) -> None:
        """Make each path show its files as this user's, in the caller's own mount namespace."""
        for path, mount in self._mounts:
            linux_syscalls.move_mount(mount, path)

    def close(self) -> None:
        """Close the descriptors once the holder has used them."""
        for _, mount in self._mounts:
            os.close(mount)
        os.close(self.namespace)


def become_agent() -> None:
    """Change from root of the sandbox's user namespace to its agent."""
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)


def _claim() -> int:
    """A number below IDS that no other live process holds. The search starts at a random number, so
    that it rarely returns one just released, whose last processes may still count."""
    locks = os.open(LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    start = int.from_bytes(os.urandom(4), "big")
    for number in range(start, start + IDS):
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number % IDS)
            return number % IDS  # the file stays open, so the lock ends with this process
        except BlockingIOError:
            continue
    raise OSError(f"every user id for sandboxes is taken: {LOCKS}")


def _namespaces(user: int) -> tuple[int, int]:
    """Descriptors of the sandbox's user namespace, and of one in which root's files are agent's.

    A child makes them as `user`, because the kernel also counts a namespace's contents for its
    creator.
    """
    reader, tell = os.pipe()
    hear, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for fd in (reader, writer):
                os.close(fd)
            _make_namespaces(user, hear, tell)
        finally:
            os._exit(0)
    for fd in (tell, hear):
        os.close(fd)
    found: list[int] = []
    try:
        while os.read(reader, 1):
            if not found:  # the second is nested in it: the child may write those maps itself
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/{child}/{name}", "w") as file:
                        file.write(f"0 0 1\n{USER_ID} {user} 1")
            found.append(os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC))
            os.write(writer, b"+")
    finally:
        for fd in (reader, writer):
            os.close(fd)
        os.waitpid(child, 0)
    if len(found) < 2:
        raise OSError("the kernel refuses user namespaces for sandboxes")
    return found[0], found[1]


def _make_namespaces(user: int, hear: int, tell: int) -> None:
    linux_syscalls.become_user_with_capabilities(user)
    linux_syscalls.unshare(linux_syscalls.CLONE_NEWUSER)
    os.write(tell, b"+")
    os.read(hear, 1)
    settings = os.open("/proc/sys", os.O_PATH | os.O_CLOEXEC)
    kernel_quotas.bound_inotify(settings)
    os.close(settings)
    linux_syscalls.enter_new_user_namespace()
    os.write(tell, b"+")
    os.read(hear, 1)
