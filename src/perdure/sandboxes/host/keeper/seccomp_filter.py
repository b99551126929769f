"""The system-call filter of sandboxes. It refuses calls that attacks use, but no build or test.

Assembles classic BPF for x86_64 and aarch64 without a compiler. It refuses the calls named here and
allows the rest, like Docker's default, but no capability brings a call back. `linux` installs it.
"""

import errno
import os
from struct import pack

NEW_NAMESPACES = 0x7E020080
"""Every CLONE_NEW* flag. CLONE_NEWTIME shares its bit with `clone`'s signal number, so it is masked."""

ALLOWED_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. Not AF_VSOCK: network namespaces do not isolate it, and it
reaches the hypervisor of a virtual machine."""

_PTRACE_ATTACH, _PTRACE_SEIZE = 16, 0x4206
_SETLEASE, _NOTIFY, _SETDELEG = 1024, 1026, 1040
"""Commands of `fcntl`. A lease blocks for 45 s every process that opens the file, also on the host
and in other sandboxes."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# No call may say which pages of a file are in memory, or evict them: sandboxes share files, and a
# grading could tell hidden tests to an agent on its host. A page fault still says it.
_READ_WRITE_FLAGS = 0x77
"""Flags of `preadv2` and `pwritev2` that neither ask for a cached page (RWF_NOWAIT) nor read past
the cache (RWF_DONTCACHE)."""
_FADV_DONTNEED = 4
_MADV_COLD, _MADV_PAGEOUT, _MADV_COLLAPSE = 20, 21, 25

# name: (x86_64, aarch64); None if the architecture does not have the call
_REFUSED = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112),
    "create_module": (174, None), "delete_module": (176, 106), "fanotify_init": (300, 262),
    "finit_module": (313, 273), "init_module": (175, 105), "ioperm": (173, None),
    "iopl": (172, None), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "lookup_dcookie": (212, 18),
    "mount": (165, 40), "move_pages": (279, 239), "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42), "open_by_handle_at": (304, 265), "perf_event_open": (298, 241),
    "pivot_root": (155, 41), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142),
    "request_key": (249, 218), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "settimeofday": (164, 170), "swapoff": (168, 225), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "uselib": (134, None), "vserver": (236, None),
}  # fmt: skip

# ENOSYS, as on a kernel that lacks them: programs then use the older calls
_ABSENT = {
    "cachestat": (451, 451),
    "clone3": (435, 435),  # its flags are behind a pointer, which a filter cannot read
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "io_setup": (206, 0), "io_submit": (209, 2),  # their flags too are behind a pointer
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "memfd_secret": (447, 447), "mincore": (27, 232), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "userfaultfd": (323, 282),
}  # fmt: skip

_CHECKED = {
    "clone": (56, 220), "fadvise64": (221, 223), "fcntl": (72, 25), "ioctl": (16, 29),
    "madvise": (28, 233), "preadv2": (327, 286), "ptrace": (101, 117), "pwritev2": (328, 287),
    "socket": (41, 198), "socketpair": (53, 199), "unshare": (272, 97),
}  # fmt: skip

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_IGNORED = 0
"""Instead of an errno: the call succeeds and does nothing, as the kernel may treat any advice."""

_Instruction = tuple[int, int, int, int]


def program(machine: str | None = None) -> bytes:
    """The filter as an array of struct sock_filter. Raises: KeyError for another architecture."""
    machine = machine or os.uname().machine
    column = list(_AUDIT).index(machine)
    lines: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        _refuse(errno.ENOSYS),  # a 32-bit program has other call numbers: refuse them all
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    for calls, code in ((_REFUSED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                lines += [(_EQUAL, 0, 1, number), _refuse(code)]
    for name, numbers in _CHECKED.items():
        body = _BODIES[name]
        lines += [(_EQUAL, 0, len(body), numbers[column]), *body]
    return b"".join(pack("=HBBI", *line) for line in (*lines, (_RETURN, 0, 0, _ALLOW)))


def _refuse(code: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _argument(index: int) -> _Instruction:
    """Load its low half: the kernel ignores the high half of flags, families and ioctl numbers."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _unless_none_of(index: int, mask: int, code: int) -> tuple[_Instruction, ...]:
    allow = (_RETURN, 0, 0, _ALLOW)
    return (_argument(index), (_ANY_BIT, 0, 1, mask), _refuse(code), allow)


def _unless_other_than(index: int, values: tuple[int, ...], code: int) -> tuple[_Instruction, ...]:
    tests = [(_EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
    return (_argument(index), *tests, (_RETURN, 0, 0, _ALLOW), _refuse(code))


def _only(index: int, values: tuple[int, ...], code: int) -> tuple[_Instruction, ...]:
    tests = [(_EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
    return (_argument(index), *tests, _refuse(code), (_RETURN, 0, 0, _ALLOW))


_BODIES = {
    "clone": _unless_none_of(0, NEW_NAMESPACES & ~0xFF, errno.EPERM),
    "fadvise64": _unless_other_than(3, (_FADV_DONTNEED,), _IGNORED),
    "fcntl": _unless_other_than(1, (_SETLEASE, _NOTIFY, _SETDELEG), errno.EPERM),
    "ioctl": _unless_other_than(1, (_TIOCSTI, _TIOCLINUX), errno.EPERM),
    "madvise": _unless_other_than(2, (_MADV_COLD, _MADV_PAGEOUT, _MADV_COLLAPSE), errno.EINVAL),
    "preadv2": _unless_none_of(5, ~_READ_WRITE_FLAGS & 0xFFFFFFFF, errno.EOPNOTSUPP),
    "ptrace": _unless_other_than(0, (_PTRACE_ATTACH, _PTRACE_SEIZE), errno.EPERM),
    "pwritev2": _unless_none_of(5, ~_READ_WRITE_FLAGS & 0xFFFFFFFF, errno.EOPNOTSUPP),
    "socket": _only(0, ALLOWED_FAMILIES, errno.EAFNOSUPPORT),
    "socketpair": _only(0, ALLOWED_FAMILIES, errno.EAFNOSUPPORT),
    "unshare": _unless_none_of(0, NEW_NAMESPACES, errno.EPERM),
}
