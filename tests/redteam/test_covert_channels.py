"""No call shows a sandbox what another did to the files that both see; honest programs still run."""

import errno
import json
import os
from pathlib import Path

import pytest

from perdure.sandboxes.base import Mount
from perdure.sandboxes.providers.docker.provider import DockerSandbox
from tests.redteam.conftest import Boot, attack, until_held

RESIDENCY = """
import ctypes, json, mmap, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
PREADV2, MINCORE, CACHESTAT, IO_SETUP, FADVISE, MADVISE = {
    "x86_64": (327, 27, 451, 206, 221, 28), "aarch64": (286, 232, 451, 0, 223, 233),
}[platform.machine()]
NOWAIT, DONTCACHE, DONTNEED, COLD, PAGEOUT, COLLAPSE = 0x8, 0x80, 4, 20, 21, 25
fd = os.open(os.path.realpath(sys.executable), os.O_RDONLY)
size = os.fstat(fd).st_size
memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
room = ctypes.create_string_buffer(1 << 20)
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(room), 4096)

def answer(*arguments):
    said = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return ctypes.get_errno() if said < 0 else "granted"

print(json.dumps({
    "a read of a cached page": answer(PREADV2, fd, vector, 1, 0, 0, NOWAIT),
    "a read past the cache": answer(PREADV2, fd, vector, 1, 0, 0, DONTCACHE),
    "mincore": answer(MINCORE, start, size, room),
    "cachestat": answer(CACHESTAT, fd, (ctypes.c_uint64 * 2)(0, size), room, 0),
    "aio": answer(IO_SETUP, 1, (ctypes.c_uint64 * 1)()),
    "cold": answer(MADVISE, start, size, COLD),
    "page out": answer(MADVISE, start, size, PAGEOUT),
    "collapse": answer(MADVISE, start, size, COLLAPSE),
}))
"""

EVICTS = """
import os
fd = os.open("/opt/tools/module.py", os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
"""

HOLDS_LOCKS = """
import fcntl, os, sys, time
held = [os.open(path, os.O_RDONLY) for path in sys.argv[1:]]
for fd in held:
    fcntl.flock(fd, fcntl.LOCK_EX)
    fcntl.lockf(fd, fcntl.LOCK_SH)
own = os.open("own", os.O_RDWR | os.O_CREAT)
fcntl.fcntl(own, 37, b"\\1\\0\\0\\0\\0\\0\\0\\0" + (77777).to_bytes(8, "little") + bytes(16))
print("held", flush=True)
time.sleep(600)
"""
"""The last is an OFD lock, whose range the kernel shows in every process namespace."""

SEES_LOCKS = """
import fcntl, os, struct, sys
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("flock on", path)
    asked = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
    if struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK:
        print("a record lock on", path)
if "77777" in open("/proc/locks").read():
    print("/proc/locks")
"""

HONEST = """
set -e
git init -q repo
cd repo
echo 1 >a
git add a
git -c user.name=a -c user.email=a@b commit -qm a
git gc -q
exec 9>lock
flock -n 9
! flock -n lock true
exec 9>&-
flock -n lock true
dd if=a of=b oflag=nocache iflag=nocache status=none
sort --parallel=2 a >/dev/null
python3 - <<'END'
import fcntl, mmap, os, sqlite3
with sqlite3.connect("rows.db") as rows:
    rows.execute("pragma journal_mode=wal")
    rows.execute("create table t (x)")
    rows.execute("insert into t values (1)")
other = sqlite3.connect("rows.db", timeout=0)
rows.execute("begin immediate")
try:
    other.execute("begin immediate")
    raise SystemExit("two writers at once")
except sqlite3.OperationalError:
    pass
with open("own", "w+b") as file:
    file.write(b"x" * 8192)
    file.flush()
    fcntl.lockf(file, fcntl.LOCK_EX)
    assert os.preadv(file.fileno(), [bytearray(4)], 0) == 4
    assert os.pwritev(file.fileno(), [b"y"], 0, os.RWF_SYNC) == 1
    memory = mmap.mmap(file.fileno(), 8192)
    memory.madvise(mmap.MADV_DONTNEED)
    assert memory[:2] == b"yx"
END
python3 -m venv --without-pip venv
./venv/bin/python -c 'import ssl, json, multiprocessing'
"""
"""With locks on its own files, and advice about its own memory."""


@pytest.fixture
def tools(tmp_path: Path) -> Mount:
    """A folder that all sandboxes of the host share, as an environment's packages are."""
    (tmp_path / "module.py").write_bytes(bytes(1 << 16))
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    return Mount(tmp_path, "/opt/tools")


async def test_no_call_says_what_is_cached(boot: Boot) -> None:
    """Each answers as on a kernel that lacks it, so that programs fall back."""
    result = await attack(await boot(), RESIDENCY)

    assert json.loads(result.stdout) == {
        "a read of a cached page": errno.EOPNOTSUPP,
        "a read past the cache": errno.EOPNOTSUPP,
        "mincore": errno.ENOSYS,
        "cachestat": errno.ENOSYS,
        "aio": errno.ENOSYS,
        "cold": errno.EINVAL,
        "page out": errno.EINVAL,
        "collapse": errno.EINVAL,
    }


async def test_no_advice_evicts_a_shared_file(boot: Boot, tools: Mount) -> None:
    """A program may say that it needs a file no longer; other sandboxes still have it in memory."""
    box = await boot(mounts=(tools,))
    with (tools.source / "module.py").open("rb") as file:
        os.fsync(file.fileno())
        file.read()
        result = await attack(box, EVICTS)

        assert (result.status.ok, os.preadv(file.fileno(), [bytearray(9)], 0, os.RWF_NOWAIT)) == (
            True,
            9,
        )


async def test_no_lock_on_a_shared_file_is_seen(boot: Boot, tools: Mount) -> None:
    """What one sandbox locks in a shared folder is free in another, and listed nowhere."""
    hostile, neighbor = await boot(mounts=(tools,)), await boot(mounts=(tools,))
    if isinstance(hostile, DockerSandbox):
        pytest.skip("not promised: the engine binds folders of the host")
    shared = ("/opt/tools/module.py", "/opt/tools", "/etc/passwd", "/usr/bin/env", "/usr/lib")
    await until_held(hostile, HOLDS_LOCKS, *shared)
    result = await attack(neighbor, SEES_LOCKS, *shared)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_honest_programs_run(boot: Boot) -> None:
    """git, flock, dd, sort, sqlite, and a virtual environment meet no refusal."""
    result = await (await boot()).exec(HONEST, timeout=120)

    assert result.status.ok, result.stderr
