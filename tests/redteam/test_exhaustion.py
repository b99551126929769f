"""Hostile code exhausts its own share: the host, and what we hold of the sandbox, go on."""

from pathlib import Path

from perdure.sandboxes.base import Exec, Sandbox
from perdure.sandboxes.providers.docker.docker_run import SPARE_PIDS
from perdure.sandboxes.providers.docker.provider import DockerSandbox
from tests.redteam.conftest import LIMITS, Boot, attack, require

FORK_BOMB = """
import os, signal, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
except OSError as error:
    print(count, error.errno)
"""

MEMORY = """
import os
for _ in range(4):
    if os.fork() == 0:
        held = [bytearray(os.urandom(1) * (16 << 20)) for _ in range(16)]
        os._exit(0)
print(sum(os.wait()[1] == 0 for _ in range(4)))
"""

SHARED_MEMORY = """
import os
for folder in ("/dev/shm", "/tmp", "/testbed", os.path.expanduser("~")):
    try:
        with open(folder + "/big", "wb") as file:
            while True:
                file.write(b"x" * (1 << 20))
    except OSError as error:
        print(error.errno)
print(sum(os.stat(folder + "/big").st_size for folder in ("/dev/shm", "/tmp", "/testbed", os.path.expanduser("~"))) >> 20)
"""

INODES = """
import os
count = 0
try:
    while count < 1 << 20:
        os.close(os.open(f"/tmp/{count}", os.O_CREAT | os.O_WRONLY))
        count += 1
except OSError as error:
    print(error.errno)
"""

DESCRIPTORS = """
import os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
    print("raised")
except (OSError, ValueError):
    pass
try:
    while True:
        os.dup(0)
except OSError as error:
    print(error.errno, hard <= 1 << 16)
"""

BURN = """
import os
for _ in range(3):
    os.fork()
while True:
    pass
"""


async def test_fork_bomb_meets_its_limit(boot: Boot) -> None:
    """pids bounds the whole sandbox, and afterwards it can be killed whole.

    In Docker's containers a few more are spared for the guest.
    """
    box = await boot()
    require(box, "pids")
    result = await attack(box, FORK_BOMB)
    count, errno = map(int, result.stdout.split())
    await box.kill()

    most = LIMITS.pids + (SPARE_PIDS if isinstance(box, DockerSandbox) else 0)

    assert (count < most, errno) == (True, 11)


async def test_processes_of_the_host_are_out_of_sight(boot: Boot) -> None:
    """The process table inside holds a handful of its own."""
    box = await boot()
    seen = (await box.exec("cat /proc/[0-9]*/cmdline")).stdout

    assert b"pytest" not in seen
    assert b"perdure.sandboxes" not in seen


async def test_memory_is_bounded_together(boot: Boot) -> None:
    """Four processes that each stay below the limit do not get past it together."""
    box = await boot()
    require(box, "memory")
    result = await attack(box, MEMORY)

    assert result.stdout != b"4\n"


async def test_disk_is_bounded_together(boot: Boot) -> None:
    """All writable folders share one disk, shared memory included; Docker has one for each."""
    box = await boot()
    result = await attack(box, SHARED_MEMORY)
    *errors, total = map(int, result.stdout.split())
    disks = 4 if isinstance(box, DockerSandbox) else 1

    assert (errors, total <= disks * LIMITS.disk_mb) == ([28] * 4, True)


async def test_inodes_are_bounded(boot: Boot) -> None:
    """Empty files end too: each costs the kernel memory."""
    result = await attack(await boot(), INODES)

    assert result.stdout == b"28\n"


async def test_descriptors_are_bounded(boot: Boot) -> None:
    """A process opens some ten thousand files and cannot raise that."""
    result = await attack(await boot(), DESCRIPTORS)

    assert result.stdout == b"24 True\n"


async def test_output_is_bounded_on_both_streams(boot: Boot) -> None:
    """A flood is cut at its cap and ends the command."""
    result = await (await boot()).exec("yes >&2 & yes")

    assert (result.status.cause, len(result.stderr) <= LIMITS.output_mb << 20) == ("output", True)


async def test_cpu_is_throttled(boot: Boot) -> None:
    """Eight busy loops are throttled to the sandbox's quota, a small one: the host may be busy too."""
    box = await boot(limits=LIMITS.model_copy(update={"cpus": 0.1}))
    require(box, "cpu")
    await box.start("burn", Exec(["python3", "-c", BURN]))
    while await _throttled(box) == 0:
        assert not (await box.wait("burn", timeout_s=0.05)).done

    assert await _throttled(box) > 0


async def test_no_core_dumps(boot: Boot) -> None:
    """A crash leaves no core, neither here nor in the host's handler."""
    result = await (await boot()).exec("ulimit -Hc; sleep 600 & kill -SEGV $!; wait $!; ls")

    assert result.stdout == b"0\n"


async def _throttled(box: Sandbox) -> int:
    """By the sandbox's own control group, as the host sees it, or as it sees itself."""
    if isinstance(box, DockerSandbox):
        files = "/sys/fs/cgroup/cpu.stat /sys/fs/cgroup/cpu/cpu.stat"
        words = (await box.exec(f"cat {files}")).stdout.decode().split()
    else:
        groups = [Path(group) for group in box.meta.groups]  # type: ignore[attr-defined]
        stats = next(g / "cpu.stat" for g in groups if (g / "cpu.stat").exists())
        words = stats.read_text().split()
    return int(words[words.index("nr_throttled") + 1])
