"""A try that is cancelled while it creates a sandbox leaves it only if a later try may own it."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.activity_context import RunningActivityAttempt
from perdure.errors import RetryHere
from perdure.rollouts.sandbox.sandbox_creation import create_sandbox, kill_on_exit
from perdure.sandboxes.base import SandboxInfo, SandboxSpec
from perdure.sandboxes.guest import service_provider
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.sandboxes.sandbox_reaper import Owner, Sweep
from perdure.settings.settings_tree import Settings
from perdure.types import Limits
from tests.service_harness import E2B, serving
from tests.stack.wait_until import until

pytestmark = pytest.mark.temporal

ID = "p-creating-agent-1"
SPEC = SandboxSpec(
    "/testbed",
    labels={"run": "r1", "rollout": "rollout/r1/add/0"},
    limits=Limits(output_mb=1),
    ttl_s=300,
)
LATE = ActivityCancellationDetails(timed_out=True)
UNKNOWN = ActivityCancellationDetails(not_found=True)
ASKED = ActivityCancellationDetails(cancel_requested=True)
STOPPING = ActivityCancellationDetails(worker_shutdown=True)


@dataclass
class Bench:
    provider: E2BProvider
    server: Any
    environment: ActivityEnvironment

    @property
    def live(self) -> list[str]:
        return [record["id"] for record in self.server.sandboxes.all()]

    async def cancelled_for(self, why: ActivityCancellationDetails) -> list[str]:
        """Cancel the try after the service has made a sandbox and before it answers. Returns those."""
        self.server.settings["boot_s"] = self.server.settings["boot_s"] or 0.5
        running = asyncio.ensure_future(self.environment.run(self.make))
        while not self.live:
            await asyncio.sleep(0.01)
        made = self.live
        self.environment.cancel(why)
        with pytest.raises(asyncio.CancelledError):
            await running
        return made

    async def make(self) -> None:
        await create_sandbox(RunningActivityAttempt(), self.provider, SPEC, ID)


@pytest.fixture
async def bench(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    async with serving(E2B, tmp_path / "server", monkeypatch) as (server, _):
        environment = ActivityEnvironment(client=client)
        environment.info = replace(environment.info, workflow_id="rollout/r1/add/0")
        yield Bench(E2BProvider(Settings(home=tmp_path / "home")), server, environment)


@pytest.fixture
async def rollout(bench: Bench, client: Client) -> str:
    """Its workflow is open; it needs no worker."""
    await client.start_workflow("Any", id="rollout/r1/add/0", task_queue="unpolled")
    return "rollout/r1/add/0"


@pytest.mark.parametrize("why", [LATE, UNKNOWN], ids=["late", "unknown"])
async def test_a_late_try_leaves_the_next_one_its_sandbox(
    bench: Bench, rollout: str, why: ActivityCancellationDetails
) -> None:
    """Its heartbeats came late and the rollout continues: the sandbox lives, and the next try
    adopts it."""
    made = await bench.cancelled_for(why)
    adopted = await bench.provider.create(SPEC, ID)

    assert (await adopted.exec("echo alive")).stdout == b"alive\n"
    assert bench.live == made


@pytest.mark.parametrize("why", [ASKED, STOPPING], ids=["cancelled", "stopping"])
async def test_a_try_that_is_told_to_end_leaves_nothing(
    bench: Bench, rollout: str, why: ActivityCancellationDetails
) -> None:
    """A cancellation or the worker's end, while the service still boots: no sandbox is left."""
    await bench.cancelled_for(why)

    assert bench.live == []


async def test_a_late_try_of_a_rollout_that_is_over_leaves_nothing(
    bench: Bench, client: Client, rollout: str
) -> None:
    """The rollout was terminated, so no try will adopt the sandbox: it is killed at once."""
    await client.get_workflow_handle(rollout).terminate()
    await bench.cancelled_for(UNKNOWN)

    assert bench.live == []


async def test_a_slow_create_that_is_cancelled_ends_at_once(
    bench: Bench, rollout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The try does not wait for the boot; the reaper finds the sandbox by its labels."""
    monkeypatch.setattr(service_provider, "CANCEL_GRACE_S", 0.1)
    bench.server.settings["boot_s"] = 5.0
    await bench.cancelled_for(ASKED)
    still_boots = [record["state"] for record in bench.server.sandboxes.all()]

    async def swept() -> bool:
        report = await Sweep(ended, nothing, 0, time.time()).over([bench.provider])
        return report.killed == 1

    async def ended(_: SandboxInfo) -> Owner:
        return Owner.ENDED

    async def nothing(_: SandboxInfo) -> None:
        return None

    await until(swept, "the late sandbox is swept")

    assert (still_boots, bench.live) == (["creating"], [])


@pytest.mark.parametrize(("why", "left"), [(LATE, 1), (ASKED, 0)], ids=["late", "cancelled"])
async def test_a_late_grading_kills_nothing_of_the_next(
    bench: Bench, rollout: str, why: ActivityCancellationDetails, left: int
) -> None:
    """A try kills its sandbox in the end, unless another try may have one of the same identity."""

    async def grade() -> None:
        sandbox = await create_sandbox(RunningActivityAttempt(), bench.provider, SPEC, ID)
        async with kill_on_exit(RunningActivityAttempt(), sandbox):
            bench.environment.cancel(why)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await bench.environment.run(grade)

    assert len(bench.live) == left


async def test_a_verdict_outlives_a_sandbox_that_ends_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a starved host its processes are still there; a sweep ends it, and nothing is graded again."""

    async def busy() -> None:
        raise RetryHere("killed, but its processes did not end")

    async def grade() -> str:
        sandbox = await create_sandbox(RunningActivityAttempt(), bench.provider, SPEC, ID)
        monkeypatch.setattr(sandbox, "kill", busy)
        async with kill_on_exit(RunningActivityAttempt(), sandbox):
            return "resolved"

    assert await bench.environment.run(grade) == "resolved"
