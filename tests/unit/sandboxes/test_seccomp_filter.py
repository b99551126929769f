"""The system-call filter decides the same on both architectures. Tests interpret its program."""

import errno
from struct import iter_unpack

import pytest

from perdure.sandboxes.host.keeper import seccomp_filter

ALLOWED = 0
CLONE_NEWUSER, NEW_TIME, SIGCHLD = 0x10000000, 0x80, 17
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003}
NUMBERS = {
    "x86_64": {"clone": 56, "clone3": 435, "fcntl": 72, "ioctl": 16, "mount": 165, "openat": 257,
               "ptrace": 101, "socket": 41, "unshare": 272},
    "aarch64": {"clone": 220, "clone3": 435, "fcntl": 25, "ioctl": 29, "mount": 40, "openat": 56,
                "ptrace": 117, "socket": 198, "unshare": 97},
}  # fmt: skip


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """The errno that the filter answers, or 0."""
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
