"""Hostile code does not outlive its box, does not nest another, and leaves nothing to the grader."""

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.sandboxes.base import Exec, Sandbox, SandboxProvider
from perdure.sandboxes.host.procfs import marked
from perdure.sandboxes.providers.docker.provider import DockerSandbox
from tests.redteam.conftest import SPEC, Boot, attack

DAEMONS = """
import os, signal, subprocess, sys
for ignored in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
    signal.signal(ignored, signal.SIG_IGN)
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
subprocess.Popen(["nohup", "setsid", "-f", "sleep", "600"])
open("up", "w").close()
while True:
    signal.pause()
"""

NAMELESS = """
import fcntl, os, signal, sys
for signum in range(1, 65):
    if signum not in (9, 19, 32, 33):
        signal.signal(signum, signal.SIG_IGN)
lock = os.open("lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.set_inheritable(lock, True)
if os.fork():
    sys.stdout.write("left" * ("stay" not in sys.argv))
    sys.stdout.flush()
    signal.pause() if "stay" in sys.argv else os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.execve(sys.executable, ["python3", "-c", sys.argv[1]], {})
"""
"""Leaves a process without parent, session, environment or fear of signals. It holds `lock`."""

SLEEPS = "import time; open('up', 'w').close(); time.sleep(600)"
FORKS_ON = """
import os
open("up", "w").close()
while True:
    if os.fork():
        os._exit(0)
"""
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
open("up", "w").close()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Its first thread ends, so that the process looks dead, and another goes on."""
KILLS_ALL = """
import os
open("up", "w").close()
while True:
    try:
        os.kill(-1, 9)
    except OSError:
        pass
"""
LOCK_IS_FREE = "flock -w 30 lock true"

NESTING = """
import ctypes, mmap, os, platform, signal, subprocess
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWNS, NEWPID, NEWNET = 0x10000000, 0x20000, 0x20000000, 0x40000000
CLONE, CLONE3, UNSHARE = (56, 435, 272) if platform.machine() == "x86_64" else (220, 435, 97)
for flags in (NEWUSER, NEWUSER | NEWNS, NEWNS, NEWPID, NEWNET, 0x80, 0x02000000):
    if libc.syscall(UNSHARE, flags) == 0:
        print("unshared", hex(flags))
pid = libc.syscall(CLONE, NEWUSER | signal.SIGCHLD, None, None, None, None)
if pid == 0:
    os._exit(0)
if pid > 0:
    print("cloned")
arguments = (ctypes.c_uint64 * 11)(NEWUSER, 0, 0, 0, signal.SIGCHLD)
pid = libc.syscall(CLONE3, ctypes.byref(arguments), 88)
if pid == 0:
    os._exit(0)
if pid > 0:
    print("cloned by clone3")
for name in ("user", "mnt", "net"):
    fd = os.open(f"/proc/1/ns/{name}", os.O_RDONLY) if os.access(f"/proc/1/ns/{name}", os.R_OK) else -1
    if fd >= 0 and libc.setns(fd, 0) == 0:
        print("entered", name)
"""

OTHER_NUMBERS = """
import ctypes, mmap, os, platform
if platform.machine() != "x86_64":
    raise SystemExit
# push rbx; mov eax, 310 (unshare of i386); mov ebx, CLONE_NEWUSER; int 0x80; pop rbx; ret
code = bytes.fromhex("53b836010000bb00000010cd805bc3")
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
pid = os.fork()
if pid == 0:
    os._exit(7 if call() == 0 else 0)
if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7:
    print("unshared as a 32-bit program")
libc = ctypes.CDLL(None)
if libc.syscall(0x40000000 | 272, 0x10000000) == 0:
    print("unshared by x32")
"""

TRACING = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ATTACH, SEIZE = 16, 0x4206
for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
    if pid == os.getpid():
        continue
    for request in (ATTACH, SEIZE):
        if libc.ptrace(request, pid, None, None) == 0:
            print("traced", pid)
    try:
        if "own" in sys.argv and os.stat(f"/proc/{pid}").st_uid == os.getuid():
            continue
        os.close(os.open(f"/proc/{pid}/mem", os.O_WRONLY))
        print("wrote memory of", pid)
    except OSError:
        pass
"""

PRIVILEGES = """
import subprocess, sys
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    if name in ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd"):
        if int(value, 16):
            print(name, value)
    if name == "NoNewPrivs" and value.strip() != "1" or name == "Seccomp" and value.strip() != "2":
        print(name, value)
for program in ("sudo", "su", "pkexec", "newuidmap"):
    try:
        if subprocess.run([program, "-n", "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
            print(program)
    except OSError:
        pass
"""

POISON = (
    "echo evil >test.py; echo evil >>~/.bashrc; echo evil >/tmp/evil; echo evil >/dev/shm/evil;"
    "mkdir -p ~/.local/lib; echo evil >~/.local/lib/evil"
)
ANTIDOTE = (
    "cat test.py; cat ~/.bashrc /tmp/evil /dev/shm/evil ~/.local/lib/evil; ls -A /tmp /dev/shm ~"
)


async def until_up(box: Sandbox) -> None:
    while not (await box.exec("[ -e up ]")).status.ok:
        await asyncio.sleep(0.01)


async def test_daemons_die_with_their_box(boot: Boot) -> None:
    """Double fork, setsid, nohup, ignored signals: after kill no process of it is on the host."""
    mark = uuid4().hex
    box = await boot()
    await box.exec(["python3", "-c", DAEMONS], env={"REDTEAM": mark})
    await until_up(box)
    await box.kill()

    assert marked(f"REDTEAM={mark}".encode()) == []


async def test_daemons_die_when_the_agent_is_stopped(boot: Boot) -> None:
    """SIGKILL of the finished command also ends its hidden processes, before a diff is captured."""
    mark = uuid4().hex
    box = await boot()
    await box.start("agent", Exec(["python3", "-c", DAEMONS], env={"REDTEAM": mark}))
    await box.wait("agent")
    await until_up(box)
    await box.signal("agent", 9)
    async with asyncio.timeout(30):  # they are killed at once, and take a moment to end
        while marked(f"REDTEAM={mark}".encode()):
            await asyncio.sleep(0.01)

    assert (await box.exec(["true"])).status.ok


@pytest.mark.parametrize(
    "left", [SLEEPS, FORKS_ON, HEADLESS], ids=["sleeps", "forks on", "headless"]
)
async def test_nothing_of_a_killed_command_lives_on(boot: Boot, left: str) -> None:
    """Without parent, session and environment, forking for ever or seeming dead: SIGKILL of the
    command ends it."""
    box = await boot()
    await box.start("agent", Exec(["python3", "-c", NAMELESS, left]))
    await box.wait("agent", timeout_s=60)
    await until_up(box)
    await box.signal("agent", 9)

    assert (await box.exec(LOCK_IS_FREE)).status.ok


async def test_nothing_of_a_command_outlives_its_deadline(boot: Boot) -> None:
    """The deadline too ends what has neither parent nor session nor environment."""
    box = await boot()
    await box.start("agent", Exec(["python3", "-c", NAMELESS, SLEEPS, "stay"], timeout_s=3))
    status = await box.wait("agent", timeout_s=60)

    assert (status.cause, (await box.exec(LOCK_IS_FREE)).status.ok) == ("timeout", True)


async def test_killing_a_command_spares_others(boot: Boot) -> None:
    """What another command left running on purpose is still there."""
    box = await boot()
    await box.exec("flock kept sleep 600 & until ! flock -n kept true; do :; done", check=True)
    await box.start("agent", Exec(["python3", "-c", NAMELESS, SLEEPS]))
    await box.wait("agent", timeout_s=60)
    await box.signal("agent", 9)

    assert (await box.exec("flock -n kept true")).status.code == 1


async def test_no_process_can_kill_what_follows_the_agent(boot: Boot) -> None:
    """After `end_all` a capture runs to its end, though the agent left a process that kills all others."""
    box = await boot()
    await box.start("agent", Exec(["python3", "-c", NAMELESS, KILLS_ALL]))
    await box.wait("agent", timeout_s=60)
    await box.signal("agent", 9)
    await box.end_all()
    result = await box.exec("flock -w 30 lock seq 100000")

    assert (result.status.code, result.stdout.count(b"\n")) == (0, 100000)


async def test_no_namespace_can_be_made(boot: Boot) -> None:
    """unshare, clone, clone3 and setns make and enter none: no capability is to be had that way."""
    result = await attack(await boot(), NESTING)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_other_numberings_open_nothing(boot: Boot) -> None:
    """The 32-bit and x32 tables of calls lead past no filter."""
    result = await attack(await boot(), OTHER_NUMBERS)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_no_other_process_can_be_traced(boot: Boot) -> None:
    """Neither pid 1 nor another command can be traced or have its memory written.

    In Docker's containers a command can write the memory of others of the same user.
    """
    box = await boot()
    await box.start("victim", Exec(["sleep", "600"]))
    spared = ["own"] if isinstance(box, DockerSandbox) else []  # /proc is writable there
    result = await attack(box, TRACING, *spared)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_privileges_are_gone_for_good(boot: Boot) -> None:
    """No capability, none to be had by any program, no setuid; the filter is on."""
    result = await attack(await boot(), PRIVILEGES)

    assert (result.status.code, result.stdout) == (0, b"")


async def test_nothing_survives_into_the_grading_sandbox(
    boot: Boot, provider: SandboxProvider, tmp_path: Path
) -> None:
    """The next sandbox of the same tree has the original and empty folders beside it."""
    (tmp_path / "test.py").write_text("original\n")
    agent = await boot(tree=tmp_path)
    await agent.exec(POISON, check=True)
    grading = await boot(tree=tmp_path)
    result = await grading.exec(ANTIDOTE)

    assert SPEC.workdir == grading.workdir
    assert b"evil\n" not in result.stdout
    assert result.stdout.startswith(b"original\n")
