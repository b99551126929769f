"""Cancelling many rollouts at once, from outside: nothing of any of them is left."""

import json

import pytest

from perdure.errors import Cancelled
from perdure.storage import store_keys
from perdure.types import RunRequest
from tests import loop_agent
from tests.stack.made_instances import INSTANCE, SLOW_INSTANCE
from tests.stack.running_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLES = 4


async def test_a_cancelled_run_cancels_its_groups_rollouts_and_agents(stack: Stack) -> None:
    """`temporal workflow cancel` of the run: every rollout has its cancelled episode."""
    run = RunRequest(
        run_id="cancel-run",
        instances=(INSTANCE,),
        n_samples=SAMPLES,
        rollout={
            "agent": loop_agent.NAME,
            "agent_options": {"mark": stack.mark},
            "heartbeat_timeout_s": 3,
        },
    )
    stack.requests += [run.rollout_request(INSTANCE, k) for k in range(SAMPLES)]
    stack.engine.hold(3)
    handle = await stack.perdure.start_run(run)
    await stack.held(*stack.requests)
    await stack.temporal_cli("workflow", "cancel", "--workflow-id", run.workflow_id)

    with pytest.raises(Cancelled):
        await handle.result()
    manifest = json.loads((await stack.store.get(store_keys.manifest(run.run_id))).data)
    assert manifest["by_status"] == {"cancelled": SAMPLES}
    assert [(await stack.episode(r)).turns for r in stack.requests] == [3] * SAMPLES
    await stack.nothing_left()


async def test_a_cancelled_run_started_again_finishes(stack: Stack) -> None:
    """What was graded stays, what was cancelled is tried again: one more attempt each."""
    run = RunRequest(
        run_id="cancel-resume",
        instances=(INSTANCE, SLOW_INSTANCE),
        concurrency=1,
        rollout={
            "agent": loop_agent.NAME,
            "agent_options": {"mark": stack.mark},
            "heartbeat_timeout_s": 3,
        },
    )
    first, second = (run.rollout_request(ref) for ref in run.instances)
    stack.requests += [first, second]
    handle = await stack.perdure.start_run(run)
    graded = await stack.episode(first)
    await stack.at(second, "grade_in_fresh_sandbox")
    await handle.cancel()
    with pytest.raises(Cancelled):
        await handle.result()
    calls = stack.engine.stats().calls
    summary = await (await stack.perdure.start_run(run)).result()

    assert (summary.rollouts, summary.resolved) == (2, 2)
    assert await stack.episode(first) == graded
    assert stack.engine.stats().calls == calls  # the second one's diff was in the store already
    await stack.solved_once(second)
