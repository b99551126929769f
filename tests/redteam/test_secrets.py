"""Hostile code reads nothing that is not its own: files, environments, keys, tests."""

import contextlib
import os
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.errors import ConfigurationError, NotFound
from perdure.sandboxes.base import Exec
from tests.redteam.conftest import Boot, attack

EVERYWHERE = """
import os, sys
ways = ["", "/proc/1/root", "/proc/self/root", "/proc/self/cwd/../../../../../..", "/proc/1/cwd/../../.."]
ways += [f"/proc/{pid}/root" for pid in os.listdir("/proc") if pid.isdigit()]
for way in ways:
    for path in sys.argv[1:]:
        try:
            print(open(way + path, "rb").read(64))
        except OSError:
            pass
"""

ENVIRONMENTS = """
import glob, sys
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        if sys.argv[1][::-1].encode() in open(path, "rb").read():
            print(path)
    except OSError:
        pass
"""

DESCRIPTORS = """
import os
for fd in map(int, os.listdir("/proc/self/fd")):
    if fd > 2:
        try:
            print(fd, os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # the listing's own
"""

KERNEL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for path in ("/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/slabinfo", "/proc/kpageflags", "/dev/mem"):
    try:
        if open(path, "rb").read(1):
            print("read", path)
    except OSError:
        pass
calls = {"keyctl": (250, 0, -4, 0), "add_key": (248, b"user", b"x", b"y", 1, -4), "syslog": (103, 10, 0, 0),
         "perf": (298, None, 0, -1, -1, 0), "bpf": (321, 0, None, 0)}
import platform
if platform.machine() == "x86_64":
    for name, arguments in calls.items():
        if libc.syscall(*arguments) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            print("called", name, ctypes.get_errno())
"""


@pytest.fixture
def secret(home: Path) -> Path:
    """A file of the host that everybody may read."""
    home.chmod(0o755)
    path = home / "secret"
    path.write_text("the host's secret")
    return path


async def test_host_files_are_not_there(boot: Boot, secret: Path) -> None:
    """Neither by path nor by any process's root or folder: shadow, keys, hidden tests, the store."""
    paths = (
        str(secret),
        "/etc/shadow",
        "/root/.ssh/id_rsa",
        f"{Path(__file__)}",
        "/var/log/dpkg.log",
    )
    result = await attack(await boot(), EVERYWHERE, *paths)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_environments_are_clean(boot: Boot) -> None:
    """A secret of the worker is in no environment and no command line that can be read inside."""
    secret = uuid4().hex
    os.environ["REDTEAM_SECRET"] = secret
    try:
        result = await attack(await boot(), ENVIRONMENTS, secret[::-1])
    finally:
        del os.environ["REDTEAM_SECRET"]

    assert (result.status.code, result.stdout) == (0, b"")


async def test_keys_of_other_sessions_are_out_of_sight(boot: Boot) -> None:
    """The environment of one sandbox (its session key) is invisible in another."""
    key = uuid4().hex
    victim = await boot()
    await victim.start("agent", Exec(["sleep", "600"], env={"SESSION_KEY": key}))
    result = await attack(await boot(), ENVIRONMENTS, key[::-1])

    assert (result.status.code, result.stdout) == (0, b"")


async def test_no_descriptor_is_inherited(boot: Boot) -> None:
    """A command starts with its three streams and nothing else of the host's."""
    result = await attack(await boot(), DESCRIPTORS)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_kernel_tells_nothing(boot: Boot) -> None:
    """Kernel memory, log, key rings, counters and slabs stay closed."""
    result = await attack(await boot(), KERNEL)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_symlinks_do_not_lead_our_reads_outside(boot: Boot, secret: Path) -> None:
    """get() of a symlink to a host file is NotFound: links are followed inside."""
    box = await boot()
    await box.exec(["ln", "-s", str(secret), "innocent"], check=True)

    with pytest.raises(NotFound):
        await box.get("innocent")


async def test_symlinks_do_not_lead_our_writes_outside(boot: Boot, secret: Path) -> None:
    """put() below a symlink to a host folder writes nothing to the host."""
    box = await boot()
    await box.exec(["ln", "-s", str(secret.parent), "folder"], check=True)
    with contextlib.suppress(ConfigurationError):  # there is no such folder inside
        await box.put("folder/secret", b"overwritten")

    assert secret.read_text() == "the host's secret"
