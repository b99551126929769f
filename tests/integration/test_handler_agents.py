"""A handler's own agent runs once in a sandbox, whatever happens to its worker."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.data_source_handlers import AgentHandler, JobDetails
from perdure.errors import ControlPlaneError
from perdure.rollouts import agent_stage
from perdure.rollouts.activity_messages import WORKER_EVICTED, Attempt
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import Sandbox, identity_of
from perdure.sandboxes.host.host_sandbox import HostSandbox
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.types import AgentEnd, Instance, RolloutRequest
from tests.integration.one_row import ROW, save_row

REQUEST = RolloutRequest(run_id="r1", instance=ROW, agent="nop", sandbox="local")
ATTEMPT = Attempt(request=REQUEST, attempt=1)
SANDBOX = identity_of(REQUEST.run_id, REQUEST.workflow_id, "agent", 1)


class Appends(AgentHandler):
    """Its agent adds a line to a file, and then does what `then` says."""

    name = f"{__name__}:Appends"
    then: ClassVar[str] = ""
    began: ClassVar[asyncio.Event]

    async def run(
        self, runtime: Sandbox, metadata: Any, config: Any, instance: Instance
    ) -> Mapping[str, Any]:
        await runtime.exec("echo line >>a.txt", cwd=runtime.workdir, check=True)
        self.began.set()
        if self.then == "waits":
            await asyncio.Event().wait()
        if self.then == "fails":
            raise KeyError("patch")
        return {"status": "done"}

    async def eval(
        self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True
    ) -> Mapping[str, Any]:
        return {"score": 1.0}


@pytest.fixture
async def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """An attempt whose sandbox is booted."""
    monkeypatch.setattr(Appends, "began", asyncio.Event(), raising=False)
    services = worker(tmp_path)
    await save_row(services, tmp_path / "tree", data_source=Appends.name)
    await ActivityEnvironment().run(Stages(services).boot, ATTEMPT)
    yield tmp_path
    await services.provider("local").kill(SANDBOX)


def worker(home: Path) -> Services:
    """What a new worker process knows: nothing but the settings."""
    local = {"allow_local": True}
    return Services(Settings(home=home / "home", store=str(home / "store"), sandbox=local))


async def lines(services: Services) -> list[bytes]:
    sandbox = await services.provider("local").attach(SANDBOX)
    return (await sandbox.read_file(f"{sandbox.workdir}/a.txt")).splitlines()


async def test_an_agent_whose_worker_was_lost_is_not_run_again_in_its_sandbox(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its half-done work is there: the next attempt has a new sandbox."""
    monkeypatch.setattr(Appends, "then", "waits")
    lost = ActivityEnvironment()
    first = asyncio.ensure_future(lost.run(Stages(worker(home)).run_agent, ATTEMPT))
    await Appends.began.wait()
    lost.worker_shutdown()
    with pytest.raises(ApplicationError) as evicted:
        await first
    monkeypatch.setattr(Appends, "then", "")
    with pytest.raises(ApplicationError) as second:
        await ActivityEnvironment().run(Stages(worker(home)).run_agent, ATTEMPT)

    assert (evicted.value.type, second.value.type) == (WORKER_EVICTED, "SandboxLost")
    assert await lines(worker(home)) == [b"one", b"line"]


async def test_stored_results_are_found_by_the_next_worker(home: Path) -> None:
    """The worker is lost after the handler's results were stored, before the stage's own."""
    services = worker(home)
    await ActivityEnvironment().run(Stages(services).run_agent, ATTEMPT)
    await services.store.delete(f"{store_keys.attempt(REQUEST, 1)}/agent.json")
    run = await ActivityEnvironment().run(Stages(worker(home)).run_agent, ATTEMPT)

    assert run.end is AgentEnd.FINISHED
    assert await lines(services) == [b"one", b"line"]


async def test_an_agent_that_raises_is_tried_in_a_new_sandbox(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which hook of which handler failed."""
    monkeypatch.setattr(Appends, "then", "fails")
    with pytest.raises(ApplicationError, match=r"`run` of the handler .*KeyError") as failed:
        await ActivityEnvironment().run(Stages(worker(home)).run_agent, ATTEMPT)

    assert (failed.value.type, failed.value.non_retryable) == ("SandboxLost", True)
    assert failed.value.details == ("agent",)


async def test_a_sandbox_lives_on_after_a_moment_without_its_control_plane(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its life is extended again once the control plane answers, while the handler's agent runs."""
    monkeypatch.setattr(Appends, "then", "waits")
    monkeypatch.setattr(agent_stage, "WATCH_S", 0.01)
    asked, extended = 0, asyncio.Event()

    async def touch(self: HostSandbox, ttl_s: float) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ControlPlaneError("502")
        extended.set()

    monkeypatch.setattr(HostSandbox, "touch", touch)
    services = worker(home)
    services.settings = services.settings.model_copy(
        update={"sandbox": services.settings.sandbox.model_copy(update={"ttl_s": 0.01})}
    )
    stage = asyncio.ensure_future(ActivityEnvironment().run(Stages(services).run_agent, ATTEMPT))
    async with asyncio.timeout(30):
        await extended.wait()
    stage.cancel()
    await asyncio.gather(stage, return_exceptions=True)
