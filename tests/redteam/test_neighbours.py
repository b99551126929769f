"""Hostile code takes nothing that a neighbour or the host needs, and never makes them wait."""

import asyncio
import ctypes
import os
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.sandboxes.base import Exec, Mount, Sandbox
from perdure.sandboxes.host.host_sandbox import HostSandbox
from perdure.sandboxes.host.keeper.kernel_quotas import INOTIFY_INSTANCES, SHARES, TERMINALS
from perdure.sandboxes.providers.apptainer import ApptainerSandbox
from perdure.sandboxes.providers.docker.provider import DockerSandbox
from tests.redteam.conftest import Boot, attack, holding, until_held

FAR_BELOW_A_LEASE_S = 20.0
"""The kernel makes others wait up to 45 s for a lease; a busy host is slow, but not this slow."""

LEASES = """
import fcntl, os, signal, sys, time
for signum in (signal.SIGIO, signal.SIGURG):
    signal.signal(signum, signal.SIG_IGN)
SETLEASE, NOTIFY, SETDELEG = 1024, 1026, 1040
commands = [(SETLEASE, fcntl.F_WRLCK), (SETLEASE, fcntl.F_RDLCK), (NOTIFY, 0xFFFFFFF), (SETDELEG, 0)]
open("own", "w").close()
held = [os.open(path, os.O_RDONLY) for path in ("own", ".", "/etc", *sys.argv[1:])]
held += [1, 2]
print("up", flush=True)
hold = "HOLD" in os.environ
commands = commands[:1] if hold else commands
while True:
    for fd in held:
        for command in commands:
            try:
                fcntl.fcntl(fd, *command)
                if not hold:
                    print("granted", command, os.readlink(f"/proc/self/fd/{fd}"), flush=True)
            except OSError:
                pass
    if not hold:
        break
    time.sleep(0.001)
"""

HELD_FILES = """
import os, stat
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    try:
        held = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for fd in held:
        try:
            again = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)
            size = os.fstat(again).st_size
            if stat.S_ISREG(os.fstat(again).st_mode):
                os.ftruncate(again, size + 1)
                print("grew", pid, fd, os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
"""

TERMINALS_OF_ALL = """
import os, time
held = []
try:
    while len(held) < 4000:
        held.append(os.open("/dev/ptmx", os.O_RDWR))
except OSError:
    pass
print(len(held), flush=True)
time.sleep(600)
"""

ONE_TERMINAL = "import os; os.openpty()"

INOTIFY = """
import ctypes, time
libc = ctypes.CDLL(None)
count = 0
while count < 4000 and libc.inotify_init1(0) >= 0:
    count += 1
print(count, flush=True)
time.sleep(600)
"""

ONE_INOTIFY = """
import ctypes
assert ctypes.CDLL(None).inotify_init1(0) >= 0
"""

LOCKS = """
import fcntl, os, sys, time
held = []
for top in sys.argv[1:]:
    for folder, _, names in os.walk(top):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                continue
            for lock in (fcntl.flock, fcntl.lockf):
                try:
                    lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    pass
            held.append(fd)
            if len(held) > 800:
                break
print(len(held), flush=True)
time.sleep(600)
"""

PROGRAMS = "ls -R /opt/tools >/dev/null && python3 -c 'import json, socket' && git --version"

IN_FLIGHT = """
import array, os, socket, time
fds = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 250)
held, sent = [], 0
try:
    while sent < 40000:
        ours, theirs = socket.socketpair()
        held.append((ours, theirs))
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        sent += len(fds)
except OSError:
    pass
print(sent, flush=True)
time.sleep(600)
"""

SIGNALS = """
import ctypes, os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 60))
libc, sent = ctypes.CDLL(None), 0
while sent < 40000 and libc.sigqueue(os.getpid(), 40, 0) == 0:
    sent += 1
print(sent, flush=True)
time.sleep(600)
"""

ONE_TIMER = """
import ctypes
timer = ctypes.c_void_p()
assert ctypes.CDLL("librt.so.1").timer_create(1, None, ctypes.byref(timer)) == 0
"""

QUEUES = """
import ctypes, os, time
libc, made = ctypes.CDLL("librt.so.1"), 0
while made < 200 and libc.mq_open(b"/%d" % made, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0:
    made += 1
print(made, flush=True)
time.sleep(600)
"""

KEYS = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
calls = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[platform.machine()]
for number, arguments in zip(calls, ((b"user", b"x", b"y", 1, -4), (b"user", b"x", None, -4), (0, -4, 1))):
    if libc.syscall(number, *arguments) >= 0 or ctypes.get_errno() != errno.EPERM:
        print(number, ctypes.get_errno())
"""


@pytest.fixture
def tools(tmp_path: Path) -> Mount:
    """A folder that all sandboxes of the host share, as an environment's packages are."""
    (tmp_path / "module.py").write_text("ok = True\n")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # in a container others are others
    return Mount(tmp_path, "/opt/tools")


@asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """The pauses of the event loop, in seconds, while the block runs."""
    pauses: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            pauses.append(time.monotonic() - last)
            last = time.monotonic()

    ticker = asyncio.create_task(tick())
    try:
        yield pauses
    finally:
        await asyncio.sleep(0.1)
        ticker.cancel()


SHARED_USER = "not promised: the kernel counts for a user that other containers share"


def has_own_users(box: Sandbox) -> bool:
    """It runs in a user namespace of its own."""
    name = box.meta.provider if isinstance(box, HostSandbox) else ""
    return name == "bubblewrap" or (name == "apptainer" and os.geteuid() != 0)


async def test_no_lease_is_granted(boot: Boot, tools: Mount) -> None:
    """No lease, delegation or directory notice on any file: others would wait 45 s for each."""
    shared = ("/etc/passwd", "/opt/tools/module.py", os.path.realpath("/usr/bin/env"))
    result = await attack(await boot(mounts=(tools,)), LEASES, *shared)

    assert (result.status.code, result.stdout) == (0, b"up\n")


async def test_leases_make_nobody_wait(boot: Boot, tools: Mount) -> None:
    """Beside a sandbox that leases shared files and its own output, a neighbour and the worker go on."""
    hostile, neighbour = await boot(mounts=(tools,)), await boot(mounts=(tools,))
    shared = ("/etc/passwd", "/opt/tools/module.py")
    await until_held(hostile, LEASES, *shared, HOLD="1")
    began = time.monotonic()
    async with ticking() as pauses:
        listed = await neighbour.exec("ls /opt/tools && python3 /opt/tools/module.py")
        await hostile.output("evil")
        await hostile.output("evil", "stderr")

    assert (listed.status.code, listed.stdout) == (0, b"module.py\n")
    assert max(pauses) < FAR_BELOW_A_LEASE_S
    assert time.monotonic() - began < FAR_BELOW_A_LEASE_S


async def test_no_file_of_the_host_is_held(boot: Boot) -> None:
    """Neither a command nor pid 1 holds a file of the host that it could fill, lease or cut."""
    box = await boot()
    if isinstance(box, DockerSandbox):
        pytest.skip(
            "output is in the engine's volume, which no process outside the container opens"
        )
    if isinstance(box, ApptainerSandbox):
        pytest.skip("not promised: apptainer gives its own log files to pid 1")
    await box.start("evil", Exec(["python3", "-c", HELD_FILES], stdin=b"given"))
    await box.wait("evil", timeout_s=60)

    assert (await box.output("evil"), await box.output("evil", "stderr")) == (b"", b"")


async def test_terminals_are_bounded(boot: Boot) -> None:
    """One sandbox cannot take the kernel's pseudo-terminals."""
    hostile, neighbour = await boot(), await boot()
    taken = await holding(hostile, TERMINALS_OF_ALL)

    assert 0 < taken <= TERMINALS
    assert (await attack(neighbour, ONE_TERMINAL)).status.ok


async def test_inotify_instances_are_bounded(boot: Boot) -> None:
    """One sandbox cannot take the inotify instances of its user: neighbours and the host have some."""
    hostile, neighbour = await boot(), await boot()
    if not has_own_users(hostile):
        pytest.skip(SHARED_USER)
    taken = await holding(hostile, INOTIFY)
    own = ctypes.CDLL(None).inotify_init1(0)

    assert (0 < taken <= INOTIFY_INSTANCES, own >= 0) == (True, True)
    os.close(own)
    assert (await attack(neighbour, ONE_INOTIFY)).status.ok


async def test_open_files_are_few(boot: Boot) -> None:
    """A process opens some thousands of files, not all that the host has."""
    result = await (await boot()).exec("ulimit -Hn")

    assert int(result.stdout) <= 4096


async def test_locks_on_shared_files_stop_no_program(boot: Boot, tools: Mount) -> None:
    """Whatever a sandbox locks among the shared files, a neighbour's programs start and read them."""
    hostile, neighbour = await boot(mounts=(tools,)), await boot(mounts=(tools,))
    await holding(hostile, LOCKS, "/opt/tools", "/etc", "/usr/bin", "/usr/lib/python3")
    result = await neighbour.exec(PROGRAMS, timeout=60)

    assert result.status.ok, result.stderr


async def test_descriptors_in_flight_stop_no_boot(boot: Boot, few_open_files: None) -> None:
    """Descriptors that a sandbox sends and never receives count for its user; the worker goes on."""
    await holding(await boot(), IN_FLIGHT)

    assert (await (await boot()).exec(["true"])).status.ok


async def test_queued_signals_are_bounded(boot: Boot) -> None:
    """A sandbox that queues signals leaves its neighbours enough for timers."""
    hostile, neighbour = await boot(), await boot()
    if not has_own_users(hostile):
        pytest.skip(SHARED_USER)
    taken = await holding(hostile, SIGNALS)

    assert taken <= SHARES[resource.RLIMIT_SIGPENDING]
    assert (await attack(neighbour, ONE_TIMER)).status.ok


async def test_message_queues_are_bounded(boot: Boot) -> None:
    """The kernel gives a user 800 KB of message queues: a sandbox takes its own share or nothing, and
    the worker's user keeps the rest."""
    hostile, neighbour = await boot(), await boot()
    taken = await holding(hostile, QUEUES)
    left = await holding(neighbour, QUEUES)

    assert (taken, left) == ((2, 2) if has_own_users(hostile) else (0, 0))


async def test_key_rings_stay_closed(boot: Boot) -> None:
    """Keys are counted for each user: no sandbox adds, finds or joins any."""
    result = await attack(await boot(), KEYS)

    assert (result.status.code, result.stdout) == (0, b"")


@pytest.fixture
def few_open_files() -> Iterator[None]:
    """This process begins with the soft limit that most hosts give."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
