"""The disk under a sandbox is full: what ran there proves nothing, unless the sandbox filled it."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.errors import RetryHere
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import Exec, ExecStatus, Mount, Sandbox, SandboxProvider, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.types import AgentEnd, Limits, RolloutRequest
from tests.integration.command_agent import CommandAgent
from tests.integration.one_row import ROW, save_row
from tests.stack.wait_until import until

WRITE = "head -c 4M /dev/zero >{0} || {{ rm {0}; exit 7; }}"
"""Leaves the last megabyte for the keeper's record of it."""
WRITES = "while [ -e hold ]; do sleep 0.01; done; " + WRITE.format("big")
"""A command that writes once the test removes `hold`, and crashes if it cannot."""


class WritingAgent(CommandAgent):
    name: ClassVar[str] = f"{__name__}:WritingAgent"
    argv: ClassVar[tuple[str, ...]] = ("bash", "-c", WRITES)


@pytest.fixture
async def small_disk(tmp_path: Path) -> AsyncIterator[Path]:
    """A mounted disk of 64 MiB, on which no sandbox is left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "perdure-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    for provider in (LocalProvider(settings(disk)), BubblewrapProvider(settings(disk))):
        await kill_all(provider)
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """To the last megabyte, so that commands can start, but not write much. Remove what it returns."""
    state = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(state.f_bavail * state.f_frsize - (1 << 20)))
    return ballast


def settings(disk: Path) -> Settings:
    return Settings(
        home=disk / "home", store=str(disk.parent / "store"), sandbox={"allow_local": True}
    )


async def services_of(disk: Path) -> Services:
    """A home on that disk, and a row whose tree holds the agent back."""
    services = Services(settings(disk))
    await save_row(services, disk.parent / "tree", "hold")
    return services


REQUEST = RolloutRequest(run_id="r1", instance=ROW, agent=WritingAgent.name, sandbox="local")


async def let_go(provider: LocalProvider) -> None:
    """Remove `hold` once a sandbox has a command that waits for it."""
    await until(lambda: [*provider.root.glob("*/execs/*/pid")], "the command runs")
    for held in provider.root.glob("*/tree/hold"):
        held.unlink()


async def kill_all(provider: SandboxProvider) -> None:
    for info in await provider.list():
        await provider.kill(info.identity)


@pytest.mark.longer
async def test_an_agent_on_a_full_host_is_repeated(small_disk: Path) -> None:
    """It crashes because others filled its host's disk. Its attempt is lost, not judged; the next one
    waits until there is room, and finishes."""
    services = await services_of(small_disk)
    boot, agent = Stages(services).boot, Stages(services).run_agent
    first, second = (Attempt(request=REQUEST, attempt=number) for number in (1, 2))
    provider = services.provider("local")
    assert isinstance(provider, LocalProvider)

    await ActivityEnvironment().run(boot, first)
    ballast = fill(small_disk)
    with pytest.raises(ApplicationError, match="disk was full") as lost:
        await asyncio.gather(ActivityEnvironment().run(agent, first), let_go(provider))
    await kill_all(provider)
    with pytest.raises(ApplicationError, match="No space left") as waits:
        await ActivityEnvironment().run(boot, second)
    ballast.unlink()
    await ActivityEnvironment().run(boot, second)
    run, _ = await asyncio.gather(ActivityEnvironment().run(agent, second), let_go(provider))
    await kill_all(provider)

    assert (lost.value.type, waits.value.type) == ("SandboxLost", "RetryHere")
    assert not waits.value.non_retryable
    assert run.end is AgentEnd.FINISHED


@pytest.mark.longer
async def test_a_diff_on_a_full_host_is_taken_later(small_disk: Path) -> None:
    """The capture needs room. Without it there is no verdict on the agent's tree: it is tried again."""
    services = await services_of(small_disk)
    provider = services.provider("local")
    assert isinstance(provider, LocalProvider)
    attempt = Attempt(request=REQUEST, attempt=1)
    await ActivityEnvironment().run(Stages(services).boot, attempt)
    await asyncio.gather(
        ActivityEnvironment().run(Stages(services).run_agent, attempt), let_go(provider)
    )
    capture = Stages(services).capture

    ballast = fill(small_disk)
    with pytest.raises(ApplicationError) as waits:
        await ActivityEnvironment().run(capture, attempt)
    ballast.unlink()
    captured = await ActivityEnvironment().run(capture, attempt)

    assert (waits.value.type, waits.value.non_retryable) == ("RetryHere", False)
    assert captured.files == 2  # `hold` went, `big` came


async def ended(disk: Path, box: Sandbox, *, filled: bool = True) -> ExecStatus:
    """How WRITES ends there."""
    await box.write_file("hold", "")
    await box.start("one", Exec(["bash", "-c", WRITES]))
    if filled:
        fill(disk)
    await box.exec(["rm", f"{box.workdir}/hold"])
    return await box.wait("one")


@pytest.mark.parametrize(("own_mb", "is_the_hosts"), [(4, True), (40, False)])
async def test_a_sandbox_that_filled_the_disk_itself_is_judged(
    small_disk: Path, own_mb: int, is_the_hosts: bool
) -> None:
    """Beyond its own share of the disk, a failed write is its code's doing."""
    provider = LocalProvider(settings(small_disk))
    spec = SandboxSpec(workdir="/testbed", limits=Limits(disk_mb=32))
    async with await provider.create(spec, "one") as box:
        await box.exec(f"head -c {own_mb}M /dev/zero >own", check=True)
        status = await ended(small_disk, box)

    assert (status.code, status.host_lacked == "disk") == (7, is_the_hosts)


async def test_a_disk_with_room_says_nothing(small_disk: Path) -> None:
    """A command that fails for another reason is not excused."""
    provider = LocalProvider(settings(small_disk))
    async with await provider.create(SandboxSpec(workdir="/testbed"), "one") as box:
        done = await box.exec("exit 7")

    assert (done.status.code, done.status.host_lacked) == (7, "")


async def test_a_sandbox_with_its_own_disk_does_not_meet_the_hosts(small_disk: Path) -> None:
    """Bubblewrap's commands write to a disk of their own, so a full host breaks none."""
    provider = BubblewrapProvider(settings(small_disk))
    if missing := provider.check():
        pytest.skip(missing[0])
    async with await provider.create(SandboxSpec(workdir="/testbed"), "one") as box:
        status = await ended(small_disk, box, filled=False)

    assert status.ok


async def test_a_build_on_a_full_host_is_no_defect_of_its_row(small_disk: Path) -> None:
    """Install lines write to the host's disk. If it is full, they are run again later."""
    provider = BubblewrapProvider(settings(small_disk))
    if missing := provider.check():
        pytest.skip(missing[0])
    (small_disk / "venv").mkdir()
    mounts = (Mount(small_disk / "venv", "/opt/perdure/venv", writable=True),)
    spec = SandboxSpec(workdir="/testbed", mounts=mounts)
    async with await provider.create(spec, "one") as box:
        fill(small_disk)
        with pytest.raises(RetryHere, match="free space"):
            await box.exec(WRITE.format("/opt/perdure/venv/big"))
