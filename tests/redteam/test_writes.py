"""Hostile code changes nothing outside its own disk. Each attack would be harmless had it worked."""

import os
from pathlib import Path

import pytest

from perdure.sandboxes.base import Mount
from perdure.sandboxes.providers.apptainer import ApptainerSandbox
from tests.redteam.conftest import Boot, attack

SETTINGS = """
import glob, os
for path in glob.glob("/proc/sys/**", recursive=True) + ["/proc/sysrq-trigger", "/proc/mtrr"]:
    if os.path.isfile(path):
        try:
            os.close(os.open(path, os.O_WRONLY))
            print(path)
        except OSError:
            pass
"""

DEVICES = """
import os, stat
for name in ("null", "zero", "full", "random", "urandom", "tty"):
    try:
        os.chmod(f"/dev/{name}", stat.S_IMODE(os.stat(f"/dev/{name}").st_mode))
        print("changed", name)
    except OSError:
        pass
for number in ((8, 0), (254, 0), (1, 1), (10, 200)):
    try:
        os.mknod("node", 0o600 | stat.S_IFBLK, os.makedev(*number))
        os.close(os.open("node", os.O_RDONLY))
        print("opened", number)
    except OSError:
        pass
"""

READ_ONLY = """
import os, sys
for folder in sys.argv[1:]:
    for path in (folder, f"/proc/self/root{folder}"):
        try:
            os.close(os.open(f"{path}/redteam", os.O_WRONLY | os.O_CREAT))
            print("wrote", path)
        except OSError:
            pass
        try:
            os.chmod(path, os.stat(path).st_mode & 0o7777)
            print("changed", path)
        except OSError:
            pass
fd = os.open(sys.argv[1] + "/file", os.O_RDONLY)
try:
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY))
    print("reopened", sys.argv[1])
except OSError:
    pass
"""

REMOUNTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT, MS_BIND = 32, 4096
for target in (b"/", b"/usr", b"/proc", b"/dev", b"/etc"):
    if libc.mount(b"none", target, b"", MS_REMOUNT | MS_BIND, None) == 0:
        print("remounted", target)
    if libc.umount2(target, 2) == 0:
        print("unmounted", target)
for kind in (b"tmpfs", b"proc", b"sysfs", b"overlay", b"cgroup", b"cgroup2"):
    if libc.mount(kind, b"/tmp", kind, 0, None) == 0:
        print("mounted", kind)
if libc.chroot(b"/tmp") == 0:
    print("chroot")
"""

CGROUPS = """
import os
for root, _, files in os.walk("/sys"):
    for name in files:
        if os.access(os.path.join(root, name), os.W_OK):
            try:
                os.close(os.open(os.path.join(root, name), os.O_WRONLY))
                print(os.path.join(root, name))
            except OSError:
                pass
"""


async def test_kernel_settings_are_read_only(boot: Boot) -> None:
    """Nothing below /proc/sys opens for writing: a core_pattern would run commands as the host's root."""
    result = await attack(await boot(), SETTINGS)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_devices_of_the_host_are_unchangeable(boot: Boot) -> None:
    """Modes of the host's nodes cannot be changed, and no disk can be made."""
    box = await boot()
    if isinstance(box, ApptainerSandbox) and os.geteuid() == 0:
        pytest.skip("not promised: apptainer gives root's sandboxes the host's own nodes")
    result = await attack(box, DEVICES)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_mounts_are_read_only(boot: Boot, tmp_path: Path) -> None:
    """Programs, settings and mounted tools cannot be written, by any path to them.

    The root folder of an Apptainer instance is its own disk: what is written there ends with it.
    """
    (tmp_path / "file").write_text("tools")
    tmp_path.chmod(0o755)  # in a container others are others
    mounts = (Mount(tmp_path, "/opt/tools"),)
    box = await boot(mounts=mounts)
    own = [] if isinstance(box, ApptainerSandbox) else ["/etc", "/", "/opt", "/sys"]
    shared = ["/opt/tools", "/usr", "/usr/bin", "/proc/1/root/usr", "/proc"]
    result = await attack(box, READ_ONLY, *shared, *own)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_nothing_can_be_mounted(boot: Boot) -> None:
    """No mount, remount, unmount or chroot."""
    result = await attack(await boot(), REMOUNTS)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_sysfs_and_cgroups_are_read_only(boot: Boot) -> None:
    """Limits cannot be lifted and no file of /sys opens for writing."""
    result = await attack(await boot(), CGROUPS)

    assert (result.status.code, result.stdout) == (0, b"")
