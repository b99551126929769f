"""The store refuses while a sandbox holds finished work, and before a run starts."""

import time
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from activities.run_activities import Runs
from perdure.errors import StoreUnavailable
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import SandboxSpec, identity_of
from perdure.settings.settings_tree import Settings
from perdure.storage import store_preflight
from perdure.storage.base import Stored
from perdure.storage.local_store import LocalStore
from perdure.types import RolloutRequest, RunRequest
from tests.stack.wait_until import until

REQUEST = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop", sandbox="local")
RUN = RunRequest(run_id="r1", instances=("toy/add-1",), rollout={"agent": "nop"})
OWN = identity_of("r1", REQUEST.workflow_id, "agent", 1)
LIFE_S = 3.0


class Refusing(LocalStore):
    """Refuses every call, as S3 does with keys that it does not know."""

    async def get(self, key: str) -> Stored:
        raise StoreUnavailable("403 InvalidAccessKeyId", fix="correct AWS_ACCESS_KEY_ID")

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        raise StoreUnavailable("403 InvalidAccessKeyId", fix="correct AWS_ACCESS_KEY_ID")


def refused(home: Path) -> Services:
    """A worker whose store refuses."""
    allowed = {"allow_local": True}
    services = Services(Settings(home=home, store=str(home / "store"), sandbox=allowed))
    services.__dict__["store"] = Refusing(home / "store")
    return services


@pytest.mark.longer
@pytest.mark.parametrize("stage", ["run_agent", "capture_diff"])
async def test_a_sandbox_outlives_the_outage(tmp_path: Path, stage: str) -> None:
    """A try that fails at the store gives the sandbox another life, and renews its seat."""
    services = refused(tmp_path)
    (tmp_path / "tree").mkdir()
    provider = services.provider("local")
    await provider.create(SandboxSpec(workdir="/w", tree=tmp_path / "tree", ttl_s=LIFE_S), OWN)
    run = {"run_agent": Stages(services).run_agent, "capture_diff": Stages(services).capture}
    end = time.monotonic() + LIFE_S + 1

    with pytest.raises(ApplicationError, match="InvalidAccessKeyId"):
        await ActivityEnvironment().run(run[stage], Attempt(request=REQUEST, attempt=1))
    await until(lambda: time.monotonic() > end, "its first life is over")
    found = [info.identity for info in await provider.list()]
    await provider.kill(OWN)

    assert found == [OWN]
    assert services.seats.taken() == 1


async def test_a_run_on_a_store_that_never_worked_is_refused(tmp_path: Path) -> None:
    """Also one that the SDK or Temporal's CLI started: its first step names the setting, for good."""
    with pytest.raises(ApplicationError, match=r"correct AWS_ACCESS_KEY_ID$") as failed:
        await ActivityEnvironment().run(Runs(refused(tmp_path)).prepare, RUN)

    assert (failed.value.type, failed.value.non_retryable) == ("ConfigurationError", True)


async def test_a_run_on_a_store_that_has_worked_waits(tmp_path: Path) -> None:
    """A worker that starts in the middle of the outage retries the step, and refuses nothing."""
    services = refused(tmp_path)
    await store_preflight.check_store(services.settings)

    with pytest.raises(ApplicationError, match="InvalidAccessKeyId") as failed:
        await ActivityEnvironment().run(Runs(services).prepare, RUN)

    assert (failed.value.type, failed.value.non_retryable) == ("StoreUnavailable", False)
