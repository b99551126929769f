"""A wrong agent option gets the same error wherever a rollout comes from."""

from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from activities.run_activities import Runs
from perdure.client.sdk import Perdure
from perdure.errors import ConfigurationError
from perdure.instances import instance_catalog
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from perdure.types import (
    GroupRequest,
    Instance,
    RolloutRequest,
    RunRequest,
    Source,
    SourceKind,
)

WRONG = {
    "unknown": ({"steps": 3}, r"agent_options\.steps: unknown, did you mean step_limit\?"),
    "wrong type": ({"step_limit": "many"}, r"agent_options\.step_limit: .*integer.*, got 'many'"),
    "wrong value": ({"client": "curl"}, r"agent_options\.client: .*'litellm' or 'direct'"),
}
TAKES = "; mini_swe_agent takes: step_limit, "


@pytest.fixture(params=WRONG)
def wrong(request: pytest.FixtureRequest) -> tuple[RolloutRequest, str]:
    """A rollout with a wrong option, and the error that it must get."""
    options, said = WRONG[request.param]
    return RolloutRequest(run_id="r", instance="toy/a", agent_options=options), said + f".*{TAKES}"


@pytest.fixture
async def services(tmp_path: Path) -> Services:
    services = Services(Settings(home=tmp_path))
    tree = tmp_path / "tree"
    tree.mkdir()
    toy = Instance(
        instance_id="a",
        dataset="toy",
        problem_statement="It is broken.",
        source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
        grading={"protocol": "eval_cmd", "eval_cmd": "true"},
    )
    await instance_catalog.save(services.store, toy)
    return services


async def test_the_sdk_refuses_before_it_asks_the_server(
    wrong: tuple[RolloutRequest, str],
) -> None:
    """Rollout, group and run are refused without a connection."""
    request, said = wrong
    perdure = Perdure(client=None)  # type: ignore[arg-type]  # no call may reach it
    run = {"agent": request.agent, "agent_options": request.agent_options}

    with pytest.raises(ConfigurationError, match=said):
        await perdure.start_rollout(request)
    with pytest.raises(ConfigurationError, match=said):
        await perdure.start_group(GroupRequest(rollout=request))
    with pytest.raises(ConfigurationError, match=said):
        await perdure.start_run(RunRequest(run_id="r", dataset="toy", rollout=run))


async def test_a_hand_written_rollout_is_refused_before_it_boots(
    wrong: tuple[RolloutRequest, str], services: Services
) -> None:
    """`temporal workflow start --type RolloutWorkflow` gets the same error; no sandbox is created."""
    request, said = wrong
    boot = Stages(services)

    with pytest.raises(ApplicationError, match=said) as refused:
        await ActivityEnvironment().run(boot.boot, Attempt(request=request, attempt=1))

    assert (refused.value.type, refused.value.non_retryable) == ("ConfigurationError", True)
    assert await services.provider(request.sandbox).list() == []


async def test_a_hand_written_run_is_refused_as_a_whole(
    wrong: tuple[RolloutRequest, str], services: Services
) -> None:
    """A run with a wrong option ends at its first activity, not once for each rollout."""
    request, said = wrong
    run = {"agent": request.agent, "agent_options": request.agent_options}

    with pytest.raises(ApplicationError, match=said):
        await ActivityEnvironment().run(
            Runs(services).prepare, RunRequest(run_id="r", dataset="toy", rollout=run)
        )
