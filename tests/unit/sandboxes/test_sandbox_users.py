"""A root worker gives each sandbox its own host user: files, ids, and sandboxes without one."""

import asyncio
import errno
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.sandboxes.base import Exec, Mount, SandboxSpec
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.host_processes import ended
from perdure.sandboxes.host.keeper import sandbox_users
from perdure.sandboxes.host.namespaces import NamespaceSandbox, needs_user_namespace
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Limits

LIMITS = Limits(memory_mb=256, cpus=2, pids=64, disk_mb=16, output_mb=1)
SPEC = SandboxSpec(workdir="/testbed", limits=LIMITS)
FIRST = 1_900_000_000
FORKS = """
import os, time
count = 0
try:
    while os.fork():
        count += 1
    time.sleep(600)
except BlockingIOError:
    print(count)
"""


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> BubblewrapProvider:
    home = tmp_path_factory.mktemp("home")
    provider = BubblewrapProvider(Settings(home=home, sandbox={"user_ids": FIRST}))
    if missing := provider.check():
        pytest.skip(missing[0])
    if os.geteuid() or needs_user_namespace():
        pytest.skip("only root gives sandboxes other users")
    return provider


@pytest.fixture
async def box(provider: BubblewrapProvider, tmp_path: Path) -> AsyncIterator[NamespaceSandbox]:
    """A sandbox whose tree has a file, and which may write in the host's folder `shared`."""
    for name in ("tree", "shared"):
        (tmp_path / name).mkdir()
    (tmp_path / "tree/old").write_text("old\n")
    mounts = (Mount(tmp_path / "shared", "/opt/shared", writable=True),)
    made = await provider.create(replace(SPEC, tree=tmp_path / "tree", mounts=mounts), "one")
    assert isinstance(made, NamespaceSandbox)
    yield made
    await provider.kill("one")


def user_of(box: NamespaceSandbox) -> int:
    """Skips if the file system of the test's folder cannot map owners."""
    if box.box.booted.user is None:
        log = (box.box.path / "log").read_text()
        assert os.strerror(errno.EINVAL) in log, log
        pytest.skip("this file system cannot map owners")
    return box.box.booted.user


async def said(box: NamespaceSandbox, script: str) -> str:
    result = await box.exec(script)
    assert result.status.ok, result.stderr
    return result.stdout.decode()


def is_free(user: int) -> bool:
    """Whether no keeper holds the lock of this id."""
    with open(sandbox_users.LOCKS, "r+b") as locks:
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, user - FIRST)
        except BlockingIOError:
            return False
        return True


async def test_the_agent_owns_what_is_its_own(box: NamespaceSandbox) -> None:
    """Inside, the tree, the home, the mounts and the files that Perdure puts belong to `agent`."""
    user_of(box)
    await box.put("/testbed/a/new", b"new\n")
    await box.put("/opt/shared/put", b"put\n")
    owners = await said(
        box, "stat -c %U . old a a/new ~ /tmp /opt/shared /opt/shared/put | sort -u"
    )
    written = await said(
        box, "echo more >>old; rm -r a; mv old moved; touch ~/x; echo to >/dev/stdout; cat moved"
    )

    assert (owners, written) == ("agent\n", "to\nold\nmore\n")


async def test_the_hosts_files_stay_roots(box: NamespaceSandbox, tmp_path: Path) -> None:
    """On the host, every file that the sandbox wrote into a host folder belongs to root."""
    user_of(box)
    await box.put("/opt/shared/put", b"put\n")
    await said(box, "mkdir /opt/shared/made && touch /opt/shared/made/file")
    owners = {path.stat().st_uid for path in tmp_path.rglob("*")}

    assert ((tmp_path / "shared/made/file").exists(), owners) == (True, {0})


async def test_an_id_returns_however_its_keeper_ends(
    provider: BubblewrapProvider, box: NamespaceSandbox
) -> None:
    """No other sandbox gets the id of a live one; after kill -9 of its keeper the id is free."""
    user, keeper = user_of(box), box.box.keeper
    assert keeper is not None
    taken = not is_free(user)
    os.kill(keeper.pid, signal.SIGKILL)
    assert await ended(keeper, 60)

    assert (taken, is_free(user)) == (True, True)


async def test_an_adopted_sandbox_keeps_its_user(
    provider: BubblewrapProvider, box: NamespaceSandbox
) -> None:
    """Files that another worker puts after attaching belong to the same user."""
    again = await BubblewrapProvider(provider.settings).attach("one")
    await again.put("later", b"x")

    assert (await said(box, "stat -c %U later"), user_of(box)) == ("agent\n", box.box.booted.user)


@pytest.mark.parametrize("mounted", [False, True], ids=["tree", "mount"])
async def test_a_workdir_that_is_closed_to_others_is_the_agents(
    provider: BubblewrapProvider, tmp_path: Path, mounted: bool
) -> None:
    """For example under a home with umask 077, where a build mounts its tree at the workdir."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    (folder / "old").write_text("old\n")
    mounts = (Mount(folder, SPEC.workdir, writable=True),) if mounted else ()
    spec = replace(SPEC, tree=None if mounted else folder, mounts=mounts)
    box = await provider.create(spec, "closed")
    try:
        assert isinstance(box, NamespaceSandbox)
        user_of(box)
        assert await said(box, "cat old; touch new; stat -c %U .") == "old\nagent\n"
    finally:
        await provider.kill("closed")


async def test_pid_1_kills_but_is_not_killed(box: NamespaceSandbox) -> None:
    """It runs as another user than the commands: it kills them all, and they cannot signal it."""
    user_of(box)
    await box.start("long", Exec(["sleep", "600"]))
    refused = await box.exec("kill -KILL 1")
    await box.end_all()
    status = await box.wait("long", timeout_s=60)

    assert (refused.status.ok, status.signal) == (False, signal.SIGKILL)


async def test_owners_that_cannot_be_mapped_leave_the_workers_user(
    provider: BubblewrapProvider,
) -> None:
    """A sandbox that mounts such files, here of procfs, boots without its own user and logs why."""
    mounts = (Mount(Path("/proc/version"), "/opt/version"),)
    made = await provider.create(replace(SPEC, mounts=mounts), "shared")
    assert isinstance(made, NamespaceSandbox)
    try:
        works = await said(made, "cat /opt/version && id -un")
        log = (made.box.path / "log").read_text()

        assert (made.box.booted.user, works.endswith("\nagent\n")) == (None, True)
        assert "/proc/version" in log
    finally:
        await provider.kill("shared")


async def test_processes_are_limited_without_cgroups(
    provider: BubblewrapProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel exempts root from the limit on a user's processes, but not the sandbox's user."""
    monkeypatch.setattr(cgroups, "plan", lambda *_: cgroups.Plan())
    boxes = await provider.create(SPEC, "one"), await provider.create(SPEC, "two")
    assert isinstance(boxes[0], NamespaceSandbox)
    user_of(boxes[0])
    try:
        bomb = (await boxes[0].exec(["python3", "-c", FORKS])).stdout
        neighbour = await boxes[1].exec("true & true & wait")

        assert (bomb, neighbour.status.ok) == (f"{LIMITS.pids - 1}\n".encode(), True)
        assert boxes[0].enforced["pids"] == f"prlimit --nproc={LIMITS.pids}"
    finally:
        await asyncio.gather(*(box.kill() for box in boxes))


async def test_0_turns_it_off(tmp_path: Path) -> None:
    """With PERDURE_SANDBOX__USER_IDS=0 every sandbox runs as the worker's user."""
    provider = BubblewrapProvider(Settings(home=tmp_path, sandbox={"user_ids": 0}))
    if missing := provider.check():
        pytest.skip(missing[0])
    async with await provider.create(SPEC, "off") as made:
        assert isinstance(made, NamespaceSandbox)
        assert made.box.booted.user is None


async def test_ids_of_many_differ(provider: BubblewrapProvider) -> None:
    """Sandboxes that boot at the same time get different ids."""
    names = [f"b{number}" for number in range(6)]
    boxes = await asyncio.gather(*(provider.create(SPEC, name) for name in names))
    try:
        found = {user_of(box) for box in boxes if isinstance(box, NamespaceSandbox)}

        assert len(found) == len(names)
        assert all(FIRST <= user < FIRST + sandbox_users.IDS for user in found)
    finally:
        await asyncio.gather(*map(provider.kill, names))
