"""What the kernel counts for a user of the host is each sandbox's own, where workers run as root."""

import asyncio
import ctypes
import errno
import os
from pathlib import Path

import pytest

from perdure.sandboxes.base import Sandbox
from perdure.sandboxes.host.host_sandbox import HostSandbox
from perdure.sandboxes.host.keeper.kernel_quotas import INOTIFY_INSTANCES
from tests.redteam.conftest import Boot, attack, holding

INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
MANY = 256
"""More instances for a user than this would need too many sandboxes to take."""

SLEEPS = "import time; print(1, flush=True); time.sleep(600)"

PIPES = """
import fcntl, os, time
held = []
try:
    while len(held) < 1000:
        held.append(os.pipe())
        fcntl.fcntl(held[-1][0], 1031, 1 << 20)  # F_SETPIPE_SZ
except OSError:
    pass
print(len(held), flush=True)
time.sleep(600)
"""

ONE_PIPE = "import fcntl, os; fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)"

IN_FLIGHT = """
import array, os, socket, sys, time
most = int(sys.argv[1])
fds = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * min(most, 250))
held, sent = [], 0
try:
    while sent < most:
        held.append(socket.socketpair())
        held[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        sent += len(fds)
except OSError:
    pass
print(sent, flush=True)
time.sleep(600 if most > 1 else 0)
"""

INOTIFY = """
import ctypes, sys, time
libc, most = ctypes.CDLL(None), int(sys.argv[1])
print(sum(libc.inotify_init1(0) >= 0 for _ in range(most)), flush=True)
time.sleep(600 if most > 1 else 0)
"""


def own_user(box: Sandbox) -> int:
    """Its commands' user on the host. Skips where another one than the worker's is not promised."""
    if not isinstance(box, HostSandbox) or box.meta.provider != "bubblewrap" or os.geteuid():
        pytest.skip("not promised: the kernel counts for a user that other sandboxes share")
    if box.box.booted.user is None:
        log = (box.box.path / "log").read_text()
        assert os.strerror(errno.EINVAL) in log, log
        pytest.skip(f"owners cannot be mapped on the file system of {box.box.path}")
    return box.box.booted.user


async def test_each_sandbox_has_a_user_of_its_own(boot: Boot) -> None:
    """To the kernel no command is root or a neighbour, whatever it calls itself."""
    boxes = await boot(), await boot()
    users = [own_user(box) for box in boxes]
    for box in boxes:
        await holding(box, SLEEPS)
    found = [_user_on_the_host(box) for box in boxes]

    assert (found, len(set(users)), 0 in users) == (users, 2, False)


def _user_on_the_host(box: Sandbox) -> int:
    assert isinstance(box, HostSandbox)
    process = box.box.record("evil").process
    assert process is not None
    return Path(f"/proc/{process.pid}").stat().st_uid


async def test_pipe_memory_is_a_sandboxs_own(boot: Boot) -> None:
    """One sandbox fills as many pipes as its user may; a neighbour still gets a large one."""
    hostile, neighbour = await boot(), await boot()
    own_user(hostile)
    taken = await holding(hostile, PIPES)

    assert 0 < taken < 1000
    assert (await attack(neighbour, ONE_PIPE)).status.ok


async def test_descriptors_in_flight_are_a_sandboxs_own(boot: Boot) -> None:
    """One sandbox sends as many descriptors as its user may; a neighbour still sends one."""
    hostile, neighbour = await boot(), await boot()
    own_user(hostile)
    taken = await holding(hostile, IN_FLIGHT, "40000")

    assert 0 < taken < 40000
    assert (await attack(neighbour, IN_FLIGHT, "1")).stdout == b"1\n"


async def test_inotify_instances_of_many_are_their_own(boot: Boot) -> None:
    """However many sandboxes take their share of inotify instances, a neighbour and the host have theirs."""
    neighbour = await boot()
    own_user(neighbour)
    most = int(INSTANCES.read_text())
    if most > MANY:
        pytest.skip(f"{most} instances for a user are too many to take")
    hostile = await asyncio.gather(*(boot() for _ in range(most // INOTIFY_INSTANCES)))
    await asyncio.gather(*(holding(box, INOTIFY, "4000") for box in hostile))
    own = ctypes.CDLL(None).inotify_init1(0)

    assert own >= 0
    os.close(own)
    assert (await attack(neighbour, INOTIFY, "1")).stdout == b"1\n"
