"""The system calls that keepers need and Python 3.11 lacks. Linux only; imports little."""

import ctypes
import os

NEW_MOUNTS = 0x00020000
NEW_CGROUPS = 0x02000000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 0x1, 0x2, 0x4, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MS_KEPT = 0xF
"""What a remount in a user namespace may not take away; the same bits in statvfs."""

_CLONE_PARENT = 0x00008000
_CLONE_INTO_CGROUP = 0x200000000
_CLONE3 = 435
_CLONE = {"x86_64": 56, "aarch64": 220}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _SIGKILL = 1, 4, 15, 9
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_EINVAL = 22
_CAP_SYS_ADMIN = 21

# PyDLL, which keeps the interpreter's lock: a forked child must find itself as it was
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
    """Join these namespaces of the process behind a pidfd (or the one behind a namespace's file)."""
    _call("setns", ctypes.c_int(pidfd), ctypes.c_int(flags))


def users_to_enter_first(pid: int) -> int:
    """NEW_USERS where only the user namespace of `pid` gives us the right to enter its others."""
    with open("/proc/self/status", "rb") as file:
        effective = next(line for line in file if line.startswith(b"CapEff:")).split()[1]
    same = os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{pid}/ns/user")
    return 0 if same or int(effective, 16) >> _CAP_SYS_ADMIN & 1 else NEW_USERS


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    texts = (os.fsencode(text) for text in (source, target, kind))
    _call("mount", *texts, ctypes.c_ulong(flags), os.fsencode(options))


def remount_read_only(target: str) -> None:
    """One mount point as this mount namespace sees it."""
    flags = os.statvfs(target).f_flag & _MS_KEPT | MS_REMOUNT | MS_BIND | MS_RDONLY
    mount("none", target, "", flags, "")


def die_with_parent(parent: int) -> None:
    """SIGKILL when the parent ends; exits when it already has."""
    _call("prctl", ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(_SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """What `ps` and `top` call this process; at most 15 bytes."""
    _call("prctl", ctypes.c_int(_PR_SET_NAME), name.encode())


def hide_memory() -> None:
    """Until it executes another program, only the host's root may trace it or read its /proc."""
    _call("prctl", ctypes.c_int(_PR_SET_DUMPABLE), ctypes.c_ulong(0))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def drop_capabilities(kept: frozenset[int] = frozenset()) -> None:
    """No program that this process becomes can have any other, not even as root of its users."""
    for capability in range(64):
        if capability in kept:
            continue
        try:
            _call("prctl", ctypes.c_int(_PR_CAPBSET_DROP), ctypes.c_ulong(capability))
        except OSError as error:
            if error.errno != _EINVAL:
                raise
            return  # the kernel's last one was the one before


def refuse_calls(instructions: bytes) -> None:
    """Install a system-call filter, for good: on this process and all that it starts or becomes."""
    zeros = [ctypes.c_ulong(0)] * 3
    _call("prctl", ctypes.c_int(_PR_SET_NO_NEW_PRIVS), ctypes.c_ulong(1), *zeros)
    program = _FilterProgram(len(instructions) // 8, instructions)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    _call("prctl", ctypes.c_int(_PR_SET_SECCOMP), mode, ctypes.byref(program))


def become_root_of_own_users() -> None:
    """In a user namespace of its own the process may mount; outside it stays who it was."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USERS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def fork_sibling(group: int | None = None) -> int:
    """Fork a child of our parent's, born in the v2 cgroup behind the descriptor `group`.

    Raises: OSError; ENOSYS, EBADF, EINVAL, EOPNOTSUPP or EBUSY when it cannot be born there.
    """
    if group is None:
        number = _CLONE[os.uname().machine]
        zeros = [ctypes.c_ulong(0)] * 4
        return _call("syscall", ctypes.c_long(number), ctypes.c_ulong(_CLONE_PARENT), *zeros)
    # struct clone_args: flags, six fields we leave empty, ..., cgroup; with CLONE_PARENT no signal
    fields = (ctypes.c_uint64 * 11)(_CLONE_PARENT | _CLONE_INTO_CGROUP, *[0] * 9, group)
    size = ctypes.c_size_t(ctypes.sizeof(fields))
    return _call("syscall", ctypes.c_long(_CLONE3), ctypes.byref(fields), size)


def name_in_environment(marker: bytes) -> None:
    """Overwrite our first environment variable in place, so that /proc/PID/environ says `marker`.

    The room for it was made when this program was started; forks inherit the name.
    """
    with open("/proc/self/stat", "rb") as file:
        text = file.read()
    fields = text[text.rfind(b")") + 2 :].split()
    start, end = int(fields[47]), int(fields[48])
    if len(marker) >= end - start:
        raise ValueError(f"no room for {marker!r} in the environment")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, marker, len(marker))
