"""The host refuses processes: what ran there proves nothing, unless the sandbox used up its own share."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.errors import RateLimited, SandboxLost
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.agent_stage import run_agent
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import boot
from perdure.rollouts.capture_stage import capture
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import Exec, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import (
    AccountCaps,
    AgentEnd,
    Limits,
    PatchRef,
    RolloutRequest,
)
from tests.integration.command_agent import CommandAgent
from tests.integration.one_row import ROW, save_row
from tests.pids_group import PidsGroup
from tests.unit.rollouts.one_try import OneTry

FORKS = (
    "python3",
    "-c",
    "import contextlib, os, time\n"
    "with contextlib.suppress(OSError):\n"
    "    for _ in range(60):\n"
    "        os.fork() or (time.sleep(30), os._exit(0))\n",
)
"""Ends well, although some of its processes may never have started."""
FILLS = ("bash", "-c", "head -c 64M /dev/zero >big; exit 0")
"""Leaves a tree of which no diff can be taken: its disk is full."""


@pytest.fixture
def pids() -> Iterator[PidsGroup]:
    """Name it before `provider`: it goes when that one's sandboxes are gone."""
    group = PidsGroup()
    group.add(os.getpid())
    yield group
    group.remove()


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[BubblewrapProvider]:
    provider = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    yield provider
    for info in await provider.list():
        await provider.kill(info.identity)


class ForkingAgent(CommandAgent):
    name: ClassVar[str] = f"{__name__}:ForkingAgent"
    argv: ClassVar[tuple[str, ...]] = FORKS


class AbsentAgent(CommandAgent):
    name: ClassVar[str] = f"{__name__}:AbsentAgent"
    argv: ClassVar[tuple[str, ...]] = ("/absent",)


class FillingAgent(CommandAgent):
    name: ClassVar[str] = f"{__name__}:FillingAgent"
    argv: ClassVar[tuple[str, ...]] = FILLS


async def placed(
    home: Path, agent: str, sandbox: str = "bubblewrap", pids_limit: int = 500
) -> tuple[Services, RolloutRequest]:
    settings = Settings(home=home, store=str(home.parent / "store"))
    services = Services(settings)
    await save_row(services, home.parent / "tree")
    request = RolloutRequest(
        run_id="r1",
        instance=ROW,
        agent=agent,
        sandbox=sandbox,
        limits=Limits(pids=pids_limit, disk_mb=32),
    )
    return services, request


async def booted(home: Path, agent: str, pids_limit: int = 500) -> tuple[Services, Attempt]:
    services, request = await placed(home, agent, pids_limit=pids_limit)
    attempt = Attempt(request=request, attempt=1)
    await ActivityEnvironment().run(Stages(services).boot, attempt)
    return services, attempt


async def test_an_agent_whose_forks_the_host_refuses_is_repeated(
    pids: PidsGroup, provider: BubblewrapProvider, tmp_path: Path
) -> None:
    """It ends well and leaves a diff, but its host had no processes for its commands: no verdict."""
    services, attempt = await booted(tmp_path / "home", ForkingAgent.name)
    pids.leave_room(20)
    with pytest.raises(ApplicationError, match="the host refused a process") as lost:
        await ActivityEnvironment().run(Stages(services).run_agent, attempt)
    pids.unlimit()

    assert lost.value.type == "SandboxLost"


@pytest.mark.longer
async def test_an_agent_that_reaches_its_own_limit_is_judged(
    provider: BubblewrapProvider, tmp_path: Path
) -> None:
    """Its own limit of processes is part of the task."""
    services, attempt = await booted(tmp_path / "home", ForkingAgent.name, pids_limit=20)
    run = await ActivityEnvironment().run(Stages(services).run_agent, attempt)

    assert (run.end, run.broke) == (AgentEnd.FINISHED, "")


async def test_a_refused_capture_counts_once_the_host_is_well(
    pids: PidsGroup, provider: BubblewrapProvider, tmp_path: Path
) -> None:
    """The agent left a tree without a diff. While its host boots no sandbox, that is no verdict."""
    services, attempt = await booted(tmp_path / "home", FillingAgent.name)
    await ActivityEnvironment().run(Stages(services).run_agent, attempt)
    pids.leave_room(0)
    with pytest.raises(ApplicationError) as waits:
        await ActivityEnvironment().run(Stages(services).capture, attempt)
    pids.unlimit()
    captured = await ActivityEnvironment().run(Stages(services).capture, attempt)

    assert (waits.value.type, waits.value.non_retryable) == ("RetryHere", False)
    assert captured.empty


async def test_an_agent_that_cannot_start_is_at_fault_only_on_a_host_that_is_well(
    provider: BubblewrapProvider, tmp_path: Path
) -> None:
    """The same end is another attempt where no sandbox boots either, here for want of a whole
    environment. That one is built again."""
    services, attempt = await booted(tmp_path / "home", AbsentAgent.name)
    [tree] = (tmp_path / "home" / "environments" / "ready").glob("*/tree")
    agent = Stages(services).run_agent
    shutil.rmtree(tree / ".git")
    with pytest.raises(ApplicationError) as lost:
        await ActivityEnvironment().run(agent, attempt)
    second = attempt.model_copy(update={"attempt": 2})
    await ActivityEnvironment().run(Stages(services).boot, second)
    run = await ActivityEnvironment().run(agent, second)

    assert lost.value.type == "SandboxLost"
    assert run.broke == "the agent crashed before its first model call"


async def test_the_tests_of_a_host_without_processes_prove_nothing(
    pids: PidsGroup, provider: BubblewrapProvider
) -> None:
    """Any command of a sandbox tells that its host refused a fork, also one that ends well."""
    sandbox = await provider.create(SandboxSpec(workdir="/testbed"), "p-tests-1")
    pids.leave_room(20)
    await sandbox.start("tests", Exec(FORKS))
    done = await sandbox.wait("tests")
    pids.unlimit()
    await sandbox.start("later", Exec(["true"]))

    assert (done.code, done.host_lacked) == (0, "processes")
    assert (await sandbox.wait("later")).host_lacked == ""


async def test_a_refused_start_costs_no_sandbox(
    pids: PidsGroup, provider: BubblewrapProvider
) -> None:
    """Commands end with the host's refusal; none says that its sandbox is lost."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    sandbox = await provider.create(SandboxSpec(workdir="/testbed"), "p-refused-1")
    ends = []
    for n in range(100):
        pids.leave_room(0)  # each time: a process that is about to end still counted before
        await sandbox.start(f"x-{n}", Exec(["true"]))
        done = await sandbox.wait(f"x-{n}")
        ends.append((done.code, done.host_lacked))
    pids.unlimit()

    assert (126, "processes") in ends
    assert {code for code, _ in ends} <= {0, 126}  # 0: another process ended, so there was room


class FullAccount(BubblewrapProvider):
    """Of an account that has room for one sandbox."""

    name = f"{__name__}:FullAccount"
    host_bound = False
    account_caps = AccountCaps(live=1)
    most: ClassVar[int] = 1

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        if len(await self.list()) >= self.most:
            raise RateLimited("the account is full", limit="concurrency")
        return await super().create(spec, identity)


async def silent(*_: object) -> None:
    """The workflow of an account, to which every message is a success."""


async def ended(home: Path) -> Job:
    """An attempt on the full account, whose agent has left a tree without a diff."""
    services, request = await placed(home, FillingAgent.name, sandbox=FullAccount.name)
    activity_attempt = OneTry("p1")
    activity_attempt.signal_account = silent  # type: ignore[assignment]
    attempt = Attempt(request=request, attempt=1, permit="1-agent")
    await boot(await Job.of(services, attempt, activity_attempt))
    job = await Job.of(services, attempt, activity_attempt)
    await run_agent(job)
    return job


async def test_the_control_of_a_full_account_takes_the_agents_slot(
    provider: BubblewrapProvider, tmp_path: Path
) -> None:
    """It needs no second sandbox, so a refused capture has its verdict where there is no room for one."""
    job = await ended(tmp_path / "home")
    captured = await capture(job)
    patch = await job.read("patch.json", PatchRef)

    assert captured.empty
    assert patch is not None
    assert patch.refused
    assert await provider.list() == []


async def test_a_capture_whose_control_has_no_room_is_a_lost_sandbox(
    provider: BubblewrapProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others use the account too: without a control there is no verdict, and no wait for room."""
    job = await ended(tmp_path / "home")
    monkeypatch.setattr(FullAccount, "most", 0)
    with pytest.raises(SandboxLost, match="the control fails too"):
        await capture(job)

    assert await job.read("patch.json", PatchRef) is None
