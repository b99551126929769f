"""One rollout's stages, as its workflow calls them, without Temporal."""

from typing import Any

from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.storage import store_keys
from perdure.types import Grade, RolloutRequest


async def played(services: Services, ref: str, agent: str, **fields: Any) -> tuple[Grade, str]:
    """The grade, and where the store has the attempt's files."""
    request = RolloutRequest(run_id=agent, instance=ref, agent=agent, **fields)
    attempt = Attempt(request=request, attempt=1, workflow_run_id="00000000")
    stages = Stages(services)
    for stage in (stages.boot, stages.run_agent, stages.capture, stages.grade):
        await ActivityEnvironment().run(stage, attempt)
    folder = store_keys.attempt(request, 1)
    grade = await stage_checkpoints.read(services.store, f"{folder}/grade-00000000.json", Grade)
    assert grade is not None
    return grade, folder
