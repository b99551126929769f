"""The system-call filter decides the same on both architectures. Tests interpret its program."""

import errno
import mmap
import os
from struct import iter_unpack

import pytest

from perdure.sandboxes.host.keeper import seccomp_filter

ALLOWED, IGNORED = -1, 0
CLONE_NEWUSER, NEW_TIME, SIGCHLD = 0x10000000, 0x80, 17
RWF_HIPRI, RWF_NOWAIT, RWF_APPEND, RWF_DONTCACHE = 0x1, 0x8, 0x10, 0x80
MADV_COLD, MADV_PAGEOUT, MADV_COLLAPSE = 20, 21, 25
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003}
NUMBERS = {
    "x86_64": {"cachestat": 451, "clone": 56, "clone3": 435, "fadvise64": 221, "fcntl": 72,
               "io_setup": 206, "io_submit": 209, "ioctl": 16, "madvise": 28, "mincore": 27,
               "mount": 165, "openat": 257, "preadv2": 327, "process_madvise": 440, "ptrace": 101, "pwritev2": 328, "socket": 41,
               "unshare": 272},
    "aarch64": {"cachestat": 451, "clone": 220, "clone3": 435, "fadvise64": 223, "fcntl": 25,
                "io_setup": 0, "io_submit": 2, "ioctl": 29, "madvise": 233, "mincore": 232, "mount": 40, "openat": 56,
                "preadv2": 286, "process_madvise": 440, "ptrace": 117, "pwritev2": 287,
                "socket": 198, "unshare": 97},
}  # fmt: skip


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """The errno that the filter answers, or ALLOWED."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0]
    data = {0: number, 4: audit or AUDIT[machine]}
    data |= {16 + 8 * n: padded[n] & 0xFFFFFFFF for n in range(6)}
    lines = list(iter_unpack("=HBBI", seccomp_filter.program(machine)))
    at = loaded = 0
    while True:
        code, yes, no, value = lines[at]
        at += 1
        if code == 0x20:
            loaded = data[value]
        elif code == 0x06:
            return ALLOWED if value == 0x7FFF0000 else value & 0xFFFF
        else:
            met = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += yes if met else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ("openat", (), ALLOWED),
        ("clone", (SIGCHLD,), ALLOWED),
        ("clone", (CLONE_NEWUSER | SIGCHLD,), errno.EPERM),
        ("clone3", (), errno.ENOSYS),
        ("unshare", (0x400,), ALLOWED),
        ("unshare", (CLONE_NEWUSER,), errno.EPERM),
        ("unshare", (NEW_TIME,), errno.EPERM),
        ("mount", (), errno.EPERM),
        ("ptrace", (0,), ALLOWED),
        ("ptrace", (16, 1), errno.EPERM),
        ("ptrace", (0x4206, 1), errno.EPERM),
        ("fcntl", (0, 2), ALLOWED),
        ("fcntl", (0, 1025), ALLOWED),
        ("fcntl", (0, 1024), errno.EPERM),
        ("fcntl", (0, 1026), errno.EPERM),
        ("fcntl", (0, 1040), errno.EPERM),
        ("ioctl", (0, 0x5401), ALLOWED),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("socket", (1,), ALLOWED),
        ("socket", (16,), ALLOWED),
        ("socket", (40,), errno.EAFNOSUPPORT),
        ("mincore", (), errno.ENOSYS),
        ("cachestat", (), errno.ENOSYS),
        ("io_setup", (), errno.ENOSYS),
        ("io_submit", (), errno.ENOSYS),
        ("process_madvise", (), errno.ENOSYS),
        ("preadv2", (0, 0, 0, 0, 0, RWF_HIPRI), ALLOWED),
        ("preadv2", (0, 0, 0, 0, 0, RWF_NOWAIT), errno.EOPNOTSUPP),
        ("preadv2", (0, 0, 0, 0, 0, RWF_HIPRI | RWF_DONTCACHE), errno.EOPNOTSUPP),
        ("pwritev2", (0, 0, 0, 0, 0, RWF_APPEND), ALLOWED),
        ("pwritev2", (0, 0, 0, 0, 0, RWF_NOWAIT), errno.EOPNOTSUPP),
        ("fadvise64", (0, 0, 0, os.POSIX_FADV_WILLNEED), ALLOWED),
        ("fadvise64", (0, 0, 0, os.POSIX_FADV_DONTNEED), IGNORED),
        ("madvise", (0, 0, mmap.MADV_DONTNEED), ALLOWED),
        ("madvise", (0, 0, MADV_COLD), errno.EINVAL),
        ("madvise", (0, 0, MADV_PAGEOUT), errno.EINVAL),
        ("madvise", (0, 0, MADV_COLLAPSE), errno.EINVAL),
    ],
)
def test_filter_decides(machine: str, call: str, arguments: tuple[int, ...], expected: int) -> None:
    """Each rule uses its architecture's call numbers, and adjacent calls are allowed."""
    assert verdict(machine, NUMBERS[machine][call], *arguments) == expected


@pytest.mark.parametrize(("machine", "foreign"), [("x86_64", "i386"), ("aarch64", "x86_64")])
def test_other_architectures_get_no_call(machine: str, foreign: str) -> None:
    """Calls of another architecture have other numbers, so all are refused."""
    assert verdict(machine, 1, audit=AUDIT[foreign]) == errno.ENOSYS


def test_x32_numbers_get_no_call() -> None:
    """x32 calls on x86_64 are recognized by a bit of their number."""
    assert verdict("x86_64", 0x40000000 | 1) == errno.ENOSYS
