"""System calls that keepers need and Python 3.11 lacks. Linux only. Imports little."""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 0x1, 0x2, 0x4, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MS_KEPT = 0xF
"""Flags that a remount in a user namespace may not remove; statvfs has the same bits."""

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 0x1, 0o2000000
_MOVE_MOUNT_FROM_FD, _MOVE_MOUNT_FOLLOW = 0x4, 0x10
_MOUNT_ATTR_IDMAP, _AT_EMPTY_PATH, _AT_FDCWD = 0x100000, 0x1000, -100

_CLONE_PARENT = 0x00008000
_CLONE_INTO_CGROUP = 0x200000000
_CLONE3 = 435
_CLONE = {"x86_64": 56, "aarch64": 220}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _SIGKILL = 1, 4, 15, 9
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 22, 24, 28, 38
_SECBIT_NO_SETUID_FIXUP = 4
_SECCOMP_MODE_FILTER = 2
_EINVAL = 22
_CAP_SYS_ADMIN = 21

# PyDLL keeps the interpreter lock, so that a forked child still holds it
_libc = ctypes.PyDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def enter(pidfd: int, flags: int) -> None:
    """Join these namespaces of the process behind a pidfd, or the one that `pidfd` is a file of."""
    _call("setns", ctypes.c_int(pidfd), ctypes.c_int(flags))


def user_namespace_flag(pid: int) -> int:
    """CLONE_NEWUSER if this process must enter the user namespace of `pid` before the others; or 0."""
    with open("/proc/self/status", "rb") as file:
        effective = next(line for line in file if line.startswith(b"CapEff:")).split()[1]
    same = os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{pid}/ns/user")
    return 0 if same or int(effective, 16) >> _CAP_SYS_ADMIN & 1 else CLONE_NEWUSER


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    texts = (os.fsencode(text) for text in (source, target, kind))
    _call("mount", *texts, ctypes.c_ulong(flags), os.fsencode(options))


def remount_read_only(target: str) -> None:
    """Make one mount point read-only in this mount namespace."""
    flags = os.statvfs(target).f_flag & MS_KEPT | MS_REMOUNT | MS_BIND | MS_RDONLY
    mount("none", target, "", flags, "")


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("users", ctypes.c_uint64),
    )


def copy_of_mount(path: str, users: int) -> int:
    """Descriptor of a detached copy of the mount at `path`. The user namespace `users` maps its
    owners: an id of the file system is that id inside. An owner without a mapping is `nobody`."""
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC)
    here, empty = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_AT_EMPTY_PATH)
    mount = _call("syscall", ctypes.c_long(_OPEN_TREE), here, os.fsencode(path), flags)
    wanted = _MountAttributes(set=_MOUNT_ATTR_IDMAP, users=users)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    fd, number = ctypes.c_int(mount), ctypes.c_long(_MOUNT_SETATTR)
    try:
        _call("syscall", number, fd, b"", empty, ctypes.byref(wanted), size)
    except OSError:
        os.close(mount)
        raise
    return mount


def move_mount(mount: int, target: str) -> None:
    """Attach it over `target`, in this mount namespace."""
    number, fd, here = ctypes.c_long(_MOVE_MOUNT), ctypes.c_int(mount), ctypes.c_int(_AT_FDCWD)
    flags = ctypes.c_uint(_MOVE_MOUNT_FROM_FD | _MOVE_MOUNT_FOLLOW)
    _call("syscall", number, fd, b"", here, os.fsencode(target), flags)


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent ends. Exits if it has ended already."""
    _call("prctl", ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(_SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """Set the name that `ps` and `top` show; at most 15 bytes."""
    _call("prctl", ctypes.c_int(_PR_SET_NAME), name.encode())


def hide_memory() -> None:
    """Only the host's root may trace this process or read its /proc, until it executes a program."""
    _call("prctl", ctypes.c_int(_PR_SET_DUMPABLE), ctypes.c_ulong(0))


def become_user_with_capabilities(user: int) -> None:
    """Change from root to another user, but keep all capabilities and own this process's /proc."""
    bits = ctypes.c_ulong(_SECBIT_NO_SETUID_FIXUP)
    _call("prctl", ctypes.c_int(_PR_SET_SECUREBITS), bits)
    os.setresgid(-1, user, -1)
    os.setresuid(-1, user, -1)
    _call("prctl", ctypes.c_int(_PR_SET_DUMPABLE), ctypes.c_ulong(1))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def drop_capabilities(kept: frozenset[int] = frozenset()) -> None:
    """No program that this process executes can have other capabilities, even as its namespace's root."""
    for capability in range(64):
        if capability in kept:
            continue
        try:
            _call("prctl", ctypes.c_int(_PR_CAPBSET_DROP), ctypes.c_ulong(capability))
        except OSError as error:
            if error.errno != _EINVAL:
                raise
            return  # beyond the kernel's last capability


def install_seccomp_filter(instructions: bytes) -> None:
    """Install a system-call filter, irrevocably, for this process and all its children."""
    zeros = [ctypes.c_ulong(0)] * 3
    _call("prctl", ctypes.c_int(_PR_SET_NO_NEW_PRIVS), ctypes.c_ulong(1), *zeros)
    program = _FilterProgram(len(instructions) // 8, instructions)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    _call("prctl", ctypes.c_int(_PR_SET_SECCOMP), mode, ctypes.byref(program))


def enter_new_user_namespace() -> None:
    """Enter a new user namespace, where the process may mount. Outside, its rights do not change."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def fork_sibling(group: int | None = None) -> int:
    """Fork a child of our parent, directly into the v2 cgroup behind the descriptor `group`.

    Raises: OSError; ENOSYS, EBADF, EINVAL, EOPNOTSUPP or EBUSY if it cannot be forked there.
    """
    if group is None:
        number = _CLONE[os.uname().machine]
        zeros = [ctypes.c_ulong(0)] * 4
        return _call("syscall", ctypes.c_long(number), ctypes.c_ulong(_CLONE_PARENT), *zeros)
    # struct clone_args: flags, nine fields that stay 0, cgroup; no exit signal with CLONE_PARENT
    fields = (ctypes.c_uint64 * 11)(_CLONE_PARENT | _CLONE_INTO_CGROUP, *[0] * 9, group)
    size = ctypes.c_size_t(ctypes.sizeof(fields))
    return _call("syscall", ctypes.c_long(_CLONE3), ctypes.byref(fields), size)


def name_in_environment(marker: bytes) -> None:
    """Overwrite our first environment variable in place, so that /proc/PID/environ shows `marker`.

    The space was reserved when this program was started. Forks inherit the marker.
    """
    with open("/proc/self/stat", "rb") as file:
        text = file.read()
    fields = text[text.rfind(b")") + 2 :].split()
    start, end = int(fields[47]), int(fields[48])
    if len(marker) >= end - start:
        raise ValueError(f"no room for {marker!r} in the environment")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, marker, len(marker))
