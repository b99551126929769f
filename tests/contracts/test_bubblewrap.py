"""What bubblewrap promises beyond the contract: isolation, hard limits, and nothing left behind."""

import asyncio
import concurrent.futures.thread  # noqa: F401  # an ordinary user cannot import it later
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, NotFound, SandboxLost
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, Mount, Network, SandboxSpec
from perdure.sandboxes.host import cgroups, keeper_client, namespaces, root_folder
from perdure.sandboxes.host import host_sandbox as sandbox_module
from perdure.sandboxes.host.host_processes import ProcessId, ended, is_alive
from perdure.sandboxes.host.keeper import linux_syscalls
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from perdure.sandboxes.host.procfs import marked, started_at
from perdure.sandboxes.providers import bubblewrap
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Limits
from tests.checkout_paths import ROOT

LIMITS = Limits(memory_mb=256, cpus=2, pids=64, disk_mb=16, output_mb=1)
SPEC = SandboxSpec(
    workdir="/testbed", limits=LIMITS, labels={"run": "r", "rollout": "o", "attempt": "1"}
)
NOBODY = 65534


@pytest.fixture
def provider(tmp_path: Path) -> BubblewrapProvider:
    provider = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := provider.check():
        pytest.skip(missing[0])
    return provider


@pytest.fixture
async def box(provider: BubblewrapProvider) -> AsyncIterator[NamespaceSandbox]:
    sandbox = await provider.create(SPEC, "one")
    assert isinstance(sandbox, NamespaceSandbox)
    yield sandbox
    await provider.kill("one")


async def out(box: NamespaceSandbox, script: str) -> str:
    result = await box.exec(script)
    return (result.stdout + result.stderr).decode()


# -- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["command", "sandbox"])
async def test_a_wait_is_told_by_the_kernel(
    box: NamespaceSandbox, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """It polls only when the command or sandbox ends, because 1,000 agents may wait in a worker."""
    polls, poll = 0, box.poll

    async def counted(exec_id: str) -> ExecStatus:
        nonlocal polls
        polls += 1
        return await poll(exec_id)

    monkeypatch.setattr(sandbox_module, "LOOK_S", 0.0)  # would look without a pause
    await box.start("long", Exec(["sleep", "3600"]))
    monkeypatch.setattr(box, "poll", counted)
    waiting = asyncio.create_task(box.wait("long", timeout_s=3600))
    while not polls:
        await asyncio.sleep(0)
    for _ in range(1000):  # it has the event loop to itself
        await asyncio.sleep(0)
    looked = polls
    if ends == "command":
        await box.signal("long", signal.SIGTERM)
    else:
        await box.kill()
    (over,) = await asyncio.gather(waiting, return_exceptions=True)

    assert looked == 1
    if ends == "command":
        assert getattr(over, "signal", over) == signal.SIGTERM
    else:  # its folder may be gone when the wait looks
        assert isinstance(over, SandboxLost) or getattr(over, "cause", over) == "sandbox"


# -- isolation ------------------------------------------------------------------------------------


async def test_host_files_are_invisible(box: NamespaceSandbox, tmp_path: Path) -> None:
    """Neither the worker's folders nor other homes nor shadow passwords exist inside."""
    (tmp_path / "secret").write_text("secret")
    seen = await out(box, f"ls -A /home; for f in {tmp_path}/secret /etc/shadow; do ls $f; done")

    assert seen.splitlines()[0] == "agent"
    assert seen.count("No such file") == 2


async def test_base_is_read_only(box: NamespaceSandbox) -> None:
    """Only the workdir, the home, /tmp and /dev/shm can be written."""
    places = "/ /usr /etc /dev /run /var /testbed /home/agent /tmp /dev/shm"
    seen = await out(box, f"for d in {places}; do touch $d/new 2>/dev/null && echo $d; done")

    assert seen.split() == ["/testbed", "/home/agent", "/tmp", "/dev/shm"]


async def test_runs_as_agent_who_owns_the_workdir(box: NamespaceSandbox) -> None:
    """Commands run as an ordinary user without capabilities, who owns its folders."""
    seen = await out(box, "id -un; id -u; stat -c %U . ~; grep CapEff /proc/self/status")

    assert seen.split() == ["agent", "1000", "agent", "agent", "CapEff:", "0" * 16]


async def test_no_network_but_loopback(box: NamespaceSandbox) -> None:
    """A server on the host's own loopback cannot be reached, and no other interface exists."""
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        refused = await box.exec(f": </dev/tcp/127.0.0.1/{port}")
        interfaces = await out(box, "tail -n +3 /proc/net/dev | cut -d: -f1")

    assert (refused.status.ok, interfaces.split()) == (False, ["lo"])


async def test_network_host_reaches_the_host(provider: BubblewrapProvider) -> None:
    """Network.HOST, meant for building environments, shares the host's network."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with await provider.create(replace(SPEC, network=Network.HOST), "net") as box:
            reached = await box.exec(f": </dev/tcp/127.0.0.1/{port}")

    assert reached.status.ok


async def test_host_processes_are_invisible(box: NamespaceSandbox) -> None:
    """A command sees its own sandbox's processes and cannot signal the worker."""
    seen = await out(
        box, f"cat /proc/[0-9]*/comm | sort -u; kill -0 {os.getpid()} 2>/dev/null && echo x"
    )

    assert set(seen.split()) <= {"bash", "cat", "sort"}


async def test_symlinks_do_not_lead_out(box: NamespaceSandbox, tmp_path: Path) -> None:
    """`get` resolves a link inside the sandbox, where the host path does not exist."""
    (tmp_path / "secret").write_text("secret")
    await box.exec(f"ln -s {tmp_path}/secret leak; ln -s /proc/1/root/etc/passwd magic")

    for path in ("leak", "magic"):
        with pytest.raises(NotFound):
            await box.get(path)


async def test_put_does_not_follow_links_out(box: NamespaceSandbox, tmp_path: Path) -> None:
    """`put` through a link to a host folder writes nothing on the host."""
    await box.exec(f"mkdir -p $PWD{tmp_path}; ln -s {tmp_path} out")

    with pytest.raises(ConfigurationError):
        await box.put("out/file", b"x")
    assert not (tmp_path / "file").exists()


async def test_fifo_does_not_block_a_reader(box: NamespaceSandbox) -> None:
    """A FIFO that the agent left where a result is expected is refused at once."""
    await box.exec("mkfifo result")

    with pytest.raises(NotFound):
        await box.get("result")


async def test_mounts_are_read_only_unless_writable(
    provider: BubblewrapProvider, tmp_path: Path
) -> None:
    """A mount can be read; only a writable one changes the host."""
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
    mounts = (
        Mount(tmp_path / "ro", "/opt/ro"),
        Mount(tmp_path / "rw", "/testbed/rw", writable=True),
    )
    async with await provider.create(replace(SPEC, mounts=mounts), "mounts") as box:
        await box.exec("touch /opt/ro/file; touch rw/file")

    assert [(tmp_path / name / "file").exists() for name in ("ro", "rw")] == [False, True]


async def test_a_home_with_the_marks_of_mount_options_is_only_a_path(tmp_path: Path) -> None:
    """Overlays separate folders by colons and options by commas. The folder of a provider that was
    named by path has a colon, too."""
    provider = BubblewrapProvider(Settings(home=tmp_path / "a:b,c\\d"))
    async with await provider.create(SPEC, "odd") as box:
        result = await box.exec("grep -c agent /etc/passwd")

    assert result.stdout == b"1\n"


async def test_missing_mount_is_named(provider: BubblewrapProvider, tmp_path: Path) -> None:
    """A mount source that does not exist is refused before the boot, and the error names it."""
    missing = tmp_path / "gone"

    with pytest.raises(ConfigurationError, match="gone"):
        await provider.create(replace(SPEC, mounts=(Mount(missing, "/opt/x"),)), "missing")


@pytest.fixture
def package_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /nix with one program."""

    def forget() -> None:
        bubblewrap._base.cache_clear()
        namespaces._programs.cache_clear()

    if any(ROOT.is_relative_to(folder) for folder in ("/tmp", "/var/tmp")):
        pytest.skip("this checkout is in /tmp, of which a sandbox has its own")
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        folder = Path(name)
        program = folder / "store/1-hello/bin/hello"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho hello\n")
        (folder / "daemon-socket").mkdir()
        for made in (folder, program):
            made.chmod(0o755)
        monkeypatch.setattr(
            root_folder, "PACKAGE_STORES", (f"{folder}/store", f"{folder}/no-such-store")
        )
        forget()
        yield folder
    forget()


async def test_programs_of_a_package_store_run_and_cannot_be_changed(
    package_store: Path, provider: BubblewrapProvider
) -> None:
    """Nix and Guix: what they installed on the host, without the sockets of their daemons."""
    hello = package_store / "store/1-hello/bin/hello"
    box = await provider.create(SPEC, "stored")
    assert isinstance(box, NamespaceSandbox)
    try:
        assert await out(box, str(hello)) == "hello\n"
        assert "Read-only file system" in await out(box, f"touch {package_store}/store/new")
        assert (await box.exec(f"ls {package_store}")).stdout == b"store\n"
    finally:
        await provider.kill("stored")


async def test_environment_does_not_reach_host_programs(
    box: NamespaceSandbox, tmp_path: Path
) -> None:
    """The host's programs that enter the sandbox ignore a command's LD_PRELOAD."""
    result = await box.exec(["true"], env={"LD_PRELOAD": str(tmp_path / "none.so")})

    assert result.stderr.count(b"cannot be preloaded") == 1


async def test_this_python_runs_inside(box: NamespaceSandbox) -> None:
    """The Python that builds environments is inside, at the same path."""
    python = os.path.realpath(sys.executable)

    assert await out(box, f"{python} -c 'print(1)'") == "1\n"


# -- self-harm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["0", "-1"])
async def test_agent_may_kill_all_it_sees(box: NamespaceSandbox, target: str) -> None:
    """`kill -9` of its process group or of all processes ends the command, not the sandbox."""
    first = await box.exec(f"kill -9 {target}; exit 3")
    second = await box.exec(["true"])

    assert (first.status.done, second.status.ok) == (True, True)


async def test_orphans_are_reaped(box: NamespaceSandbox) -> None:
    """Orphans leave no zombies, which would use up the pid limit."""
    await box.exec("for i in $(seq 20); do setsid -f true; done")
    seen = await out(box, "while grep -slq '^State:.Z' /proc/[0-9]*/status; do :; done; echo none")

    assert seen == "none\n"


# -- keepers ----------------------------------------------------------------------------------------


async def test_killed_fork_server_is_started_again(
    provider: BubblewrapProvider, box: NamespaceSandbox
) -> None:
    """After kill -9 of the fork server, old sandboxes keep working and new ones boot."""
    (fork_server,) = keeper_client._fork_servers
    os.kill(fork_server.pid, signal.SIGKILL)
    assert await ended(ProcessId(fork_server.pid, started_at(fork_server.pid)), 60)
    old = await box.exec(["true"])
    async with await provider.create(SPEC, "two") as second:
        new = await second.exec(["true"])

    assert (old.status.ok, new.status.ok) == (True, True)


async def test_killed_launcher_is_replaced(box: NamespaceSandbox) -> None:
    """After kill -9 of the launcher, running commands still report and the next one starts."""
    await box.start("long", Exec(["bash", "-c", "until [ -e go ]; do sleep 0.01; done; exit 5"]))
    keeper = box.box.keeper
    assert keeper is not None
    launcher = children_of(keeper.pid)[0]  # the first that a keeper forks
    os.kill(launcher, signal.SIGKILL)
    assert await ended(ProcessId(launcher, started_at(launcher)), 60)
    await box.exec(["true"])
    again = await box.exec("touch go")
    status = await box.wait("long")

    assert (again.status.ok, status.code) == (True, 5)


async def test_a_waiting_worker_sends_a_request_that_was_never_sent(
    box: NamespaceSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies between recording a command and requesting it. The next worker only watches."""
    with monkeypatch.context() as patch:
        patch.setattr(NamespaceSandbox, "_launch", _dies)
        with pytest.raises(KeyboardInterrupt):
            await box.start("agent", Exec(["bash", "-c", "exit 7"]))

    status = await box.wait("agent", 60)

    assert (status.state, status.code) == (ExecState.EXITED, 7)


async def test_a_command_that_was_killed_before_it_began_never_runs(
    box: NamespaceSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keeper had no time to start it."""
    with monkeypatch.context() as patch:
        patch.setattr(NamespaceSandbox, "_launch", _dies)
        with pytest.raises(KeyboardInterrupt):
            await box.start("late", Exec(["touch", "ran"]))
    await box.signal("late", signal.SIGKILL)
    status = await box.wait("late", 60)
    ran = await box.exec(["test", "-e", "ran"])

    assert (status.state, status.cause, ran.status.ok) == (ExecState.KILLED, "signal", False)


async def _dies(*_: object) -> None:
    raise KeyboardInterrupt


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_commands_inherit_three_descriptors(box: NamespaceSandbox) -> None:
    """A command has its three streams and no other descriptor of the keeper or the launcher."""
    seen = await out(box, "exec ls /proc/self/fd")

    assert seen.split() == ["0", "1", "2", "3"]  # the last is the folder that ls reads


async def test_commands_start_with_default_signals(box: NamespaceSandbox) -> None:
    """A command ignores or blocks no signal, even if the worker or the keeper does."""
    seen = await out(box, "exec grep -E '^Sig(Blk|Ign):' /proc/self/status")
    named = [int(mask, 16) & 0x7FFFFFFF for mask in seen.split()[1::2]]

    assert named == [0, 0]


async def test_script_without_interpreter_runs(box: NamespaceSandbox) -> None:
    """An executable text without a `#!` line runs in sh, as a shell would run it."""
    await box.put("plain", b"echo ran $1", mode=0o755)
    result = await box.exec(["./plain", "here"])

    assert result.stdout == b"ran here\n"


async def test_agent_cannot_flood_the_keepers_pipe(box: NamespaceSandbox) -> None:
    """The agent can write to pid 1's input. The sandbox stays alive, and still reaps orphans."""
    await box.exec("echo x >/proc/1/fd/0; exec 3>/proc/1/fd/0; echo y >&3")
    result = await box.exec(["true"])

    assert result.status.ok


async def test_killed_keeper_ends_its_helpers(
    provider: BubblewrapProvider, box: NamespaceSandbox
) -> None:
    """kill -9 of the keeper ends its launcher, forwarder and holder at once."""
    keeper = box.box.keeper
    assert keeper is not None
    helpers = [ProcessId(pid, started_at(pid)) for pid in children_of(keeper.pid)]
    os.kill(keeper.pid, signal.SIGKILL)

    assert [await ended(helper, 60) for helper in helpers] == [True] * len(helpers)


# -- limits ---------------------------------------------------------------------------------------


async def test_sandboxes_end_by_themselves(provider: BubblewrapProvider) -> None:
    """Past its deadline or without its folder, a sandbox ends without a worker or a reaper.

    At its deadline its commands, cgroups and mounts go at once; the reaper removes the folder. A
    keeper looks every five seconds, so both wait in one test.
    """
    expires, bare = [await provider.create(SPEC, name) for name in ("expires", "bare")]
    assert isinstance(bare, NamespaceSandbox)
    keeper = bare.box.keeper
    assert keeper is not None
    await expires.start("long", Exec(["sleep", "infinity"]))
    await expires.touch(0.5)  # set after the boot, which may take longer on a slow host
    shutil.rmtree(bare.box.path)
    status = await expires.wait("long", timeout_s=60)
    folder = str(provider.root / "expires")
    while leftovers(provider, "expires") != [folder]:
        await asyncio.sleep(0.05)

    assert (status.state, status.cause) == (ExecState.KILLED, "sandbox")
    assert [info.alive for info in await provider.list()] == [False]
    with pytest.raises(SandboxLost):
        await provider.attach("expires")
    assert await ended(keeper, 60)


async def test_first_deadline_is_the_specs(provider: BubblewrapProvider) -> None:
    """A sandbox that is never renewed ends too."""
    async with await provider.create(replace(SPEC, ttl_s=600), "first"):
        (info,) = await provider.list()

    assert 500 < info.expires - info.created < 700


async def test_a_kernel_without_cgroup_kill_ends_commands_and_sandboxes(
    provider: BubblewrapProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cgroup v1 alone, processes are killed one by one."""
    found = cgroups._hierarchies()
    if "freezer" not in found.v1:
        pytest.skip("no writable freezer cgroup here")
    monkeypatch.setattr(cgroups, "_hierarchies", lambda: replace(found, v2=None))
    async with await provider.create(SPEC, "v1") as box:
        status = (await box.exec("sleep 600 & sleep 600", timeout=1)).status

    assert status.cause == "timeout"
    assert leftovers(provider, "v1") == []


@pytest.mark.parametrize("place", ["/testbed", "/tmp", "/home/agent", "/dev/shm"])
async def test_full_disk_is_enospc(box: NamespaceSandbox, place: str) -> None:
    """Writing more than the disk limit fails with ENOSPC, in every writable folder."""
    seen = await out(box, f"head -c 20M /dev/zero >{place}/big")

    assert "No space left on device" in seen


async def test_memory_limit_is_oom(box: NamespaceSandbox) -> None:
    """A command above the memory limit is reported as killed by it, even below a shell."""
    if not box.enforced["memory"].startswith("cgroup"):
        pytest.skip("no writable memory cgroup here")
    python = os.path.realpath(sys.executable)
    direct = await box.exec([python, "-c", "x = bytearray(400 << 20)"])
    below = await box.exec(f"{python} -c 'x = bytearray(400 << 20)'; exit $?")

    assert [result.status.cause for result in (direct, below)] == ["oom", "oom"]


async def test_fork_bomb_is_bounded(box: NamespaceSandbox) -> None:
    """A fork bomb reaches the pid limit and dies at its deadline. The sandbox keeps working."""
    if box.enforced["pids"] == "none":
        pytest.skip("no pid limit can be enforced here")
    bomb = await box.exec("bomb() { bomb | bomb & }; bomb; sleep 600", timeout=1)
    after = await box.exec(["true"])

    assert (bomb.status.cause, after.status.ok) == ("timeout", True)


# -- death ----------------------------------------------------------------------------------------


async def test_dead_holder_ends_every_command(
    provider: BubblewrapProvider, box: NamespaceSandbox
) -> None:
    """After kill -9 of the holder, running commands are killed(sandbox) at once and new ones lost."""
    await box.start("long", Exec(["bash", "-c", "echo inside; exec sleep 600"]))
    while await box.output("long") != b"inside\n":
        await asyncio.sleep(0.01)
    holder = box.box.holder
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    status = await box.wait("long")

    assert (status.state, status.cause) == (ExecState.KILLED, "sandbox")
    assert await ended(holder, 60)
    with pytest.raises(SandboxLost):
        await box.start("new", Exec(["true"]))


async def test_holder_that_dies_slowly_is_known_as_the_cause(box: NamespaceSandbox) -> None:
    """Commands that die with the holder count as killed by the end of the sandbox."""
    await box.start("long", Exec(["bash", "-c", "echo inside; exec sleep 600"]))
    while await box.output("long") != b"inside\n":
        await asyncio.sleep(0.01)
    holder = box.box.holder
    assert holder is not None
    with visited(holder.pid):
        os.kill(holder.pid, signal.SIGKILL)
        status = await box.wait("long")
        assert is_alive(holder)

    assert (status.state, status.cause) == (ExecState.KILLED, "sandbox")


@contextmanager
def visited(holder: int) -> Iterator[None]:
    """Keep a process of its pid namespace unreaped, so that the holder cannot exit."""
    inside, is_inside = os.pipe()
    over, is_over = os.pipe()
    if (parent := os.fork()) == 0:
        try:
            linux_syscalls.enter(
                os.pidfd_open(holder),
                linux_syscalls.user_namespace_flag(holder) | linux_syscalls.CLONE_NEWPID,
            )
            if (child := os.fork()) == 0:
                signal.pause()
            os.write(is_inside, b"x")
            os.close(is_over)
            os.read(over, 1)
            os.waitpid(child, 0)
        finally:
            os._exit(0)
    os.close(is_inside)
    assert os.read(inside, 1)
    try:
        yield
    finally:
        for fd in (is_over, over, inside):
            os.close(fd)
        os.waitpid(parent, 0)


async def test_dead_identity_is_not_revived(
    provider: BubblewrapProvider, box: NamespaceSandbox
) -> None:
    """create and attach of a dead identity raise SandboxLost until it is killed."""
    holder = box.box.holder
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    assert await ended(holder, 60)

    for again in (provider.create(SPEC, "one"), provider.attach("one")):
        with pytest.raises(SandboxLost):
            await again


async def test_dead_keeper_is_lost_and_cleaned(
    provider: BubblewrapProvider, box: NamespaceSandbox
) -> None:
    """Without its keeper a sandbox is lost; kill still finds all its processes."""
    keeper, holder = box.box.keeper, box.box.holder
    assert keeper is not None
    assert holder is not None
    os.kill(keeper.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await box.exec(["true"])
    await provider.kill("one")

    assert not is_alive(holder)
    assert leftovers(provider, "one") == []


async def test_kill_leaves_nothing(provider: BubblewrapProvider, box: NamespaceSandbox) -> None:
    """After kill no process, folder, cgroup or mount of the sandbox remains."""
    await box.start("long", Exec(["bash", "-c", "setsid -f sleep 600; sleep 600"]))
    await provider.kill("one")

    assert leftovers(provider, "one") == []


def test_creator_killed_half_way_leaves_nothing(provider: BubblewrapProvider) -> None:
    """kill -9 of the process that creates a sandbox, while it boots: kill cleans up after it."""
    creator = multiprocessing.get_context("fork").Process(target=_create, args=(provider,))
    creator.start()
    keeper = provider.root / "half" / "keeper"
    while not keeper.exists():
        assert creator.is_alive() or keeper.exists()
    creator.kill()
    creator.join()
    asyncio.run(provider.kill("half"))

    assert leftovers(provider, "half") == []


def _create(provider: BubblewrapProvider) -> None:
    asyncio.run(provider.create(SPEC, "half"))


def leftovers(provider: BubblewrapProvider, identity: str) -> list[str]:
    """Everything on this host that still contains the sandbox's name."""
    box = provider.root / identity
    processes = [str(pid) for pid in marked(f"PERDURE_BOX={box}".encode())]
    mounts = [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(box) in line
    ]
    own = cgroups.group_name(box)
    # os.walk skips folders that vanish meanwhile; Path.rglob raises
    groups = [where for where, _, _ in os.walk("/sys/fs/cgroup") if os.path.basename(where) == own]
    folders = [str(box)] if box.exists() else []
    return processes + mounts + groups + folders


def open_to_others() -> bool:
    """An ordinary user can only run programs in folders that they may enter."""
    return _may_be_entered(Path(__file__).resolve()) and python_for_others() is not None


def python_for_others() -> Path | None:
    """This Python or, if it is in a closed home folder, the system's Python of this version."""
    for candidate in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        path = Path(candidate).resolve()
        if path.exists() and _may_be_entered(path):
            return path
    return None


def _may_be_entered(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in path.parents)


# -- without root ---------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="then the whole suite runs without root")
@pytest.mark.skipif(not open_to_others(), reason="this checkout is closed to other users")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "id -u; stat -c %U file; echo new >file; mv folder moved && cat file",
            "1000\nagent\nnew\n",
        ),
        ("head -c 20M /dev/zero 2>&1 >big | grep -o 'No space left'", "No space left\n"),
        ("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '", "lo\n"),
    ],
)
def test_works_without_root(script: str, expected: str) -> None:
    """An ordinary user gets the same sandbox: overlay, disk limit, no network."""

    async def run(home: Path) -> bytes:
        (home / "tree/folder").mkdir(parents=True)
        (home / "tree/file").write_text("old")
        provider = BubblewrapProvider(Settings(home=home))
        async with await provider.create(replace(SPEC, tree=home / "tree"), "one") as box:
            return (await box.exec(script)).stdout

    assert as_nobody(run) == expected.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="then the whole suite runs without root")
@pytest.mark.skipif(not open_to_others(), reason="this checkout is closed to other users")
def test_deadline_without_cgroups() -> None:
    """Without cgroups, a time-out still ends children in sessions of their own."""

    async def run(home: Path) -> bytes:
        script = "setsid -f flock lock sleep 600; until ! flock -n lock true; do :; done; sleep 600"
        async with await BubblewrapProvider(Settings(home=home)).create(SPEC, "one") as box:
            status = (await box.exec(script, timeout=2)).status
            gone = (await box.exec("flock -w 60 lock true")).status
            return f"{status.cause} {gone.ok}".encode()

    assert as_nobody(run) == b"timeout True"


def as_nobody(run: Callable[[Path], Awaitable[bytes]]) -> bytes:
    """The result of `run(home)` in a forked process without root or capabilities."""
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        os.chown(folder, NOBODY, NOBODY)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(writer, _run_as_nobody(run, Path(folder)))
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        return answer


def _run_as_nobody(run: Callable[[Path], Awaitable[bytes]], home: Path) -> bytes:
    try:
        sys.executable = str(python_for_others())
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        _forget_root()

        async def main() -> bytes:
            return await run(home)

        return asyncio.run(main())
    except BaseException:
        return traceback.format_exc().encode()


def _forget_root() -> None:
    from perdure.sandboxes.host import namespaces
    from perdure.sandboxes.providers import bubblewrap

    for cached in (namespaces.needs_user_namespace, bubblewrap._base):
        cached.cache_clear()
