"""Terminated workflows run no clean-up: the reaper ends their sandboxes, and no others."""

from dataclasses import replace

import pytest
from temporalio.client import (
    Client,
    CountWorkflowsInput,
    Interceptor,
    ListWorkflowsInput,
    OutboundInterceptor,
    WorkflowExecutionAsyncIterator,
    WorkflowExecutionCount,
)
from temporalio.testing import ActivityEnvironment

from activities.sweep_activities import SweepActivities
from perdure.client import temporal_names
from perdure.gateway.control_client import GatewayControl
from perdure.home_folder import host_of, load_secrets
from perdure.rollouts.activity_messages import SweepRequest
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.sandbox_reaper import SweepReport
from perdure.types import RolloutRequest
from tests.stack.running_stack import Stack
from tests.stack.wait_until import until

SOON_S = 30.0
TWO_MINUTES_S = 120.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


class NothingListed(Interceptor):
    """Visibility that lags behind for ever: to its lists no workflow exists."""

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _NothingListed(next)


class _NothingListed(OutboundInterceptor):
    def list_workflows(self, input: ListWorkflowsInput) -> WorkflowExecutionAsyncIterator:
        return super().list_workflows(replace(input, query="WorkflowId = 'none'"))

    async def count_workflows(self, input: CountWorkflowsInput) -> WorkflowExecutionCount:
        return WorkflowExecutionCount(count=0, groups=[])


async def test_a_live_rollout_that_visibility_does_not_show_is_left_alone(stack: Stack) -> None:
    """The reaper asks the workflow itself who owns a sandbox, so a lagging list ends no live
    sandbox."""
    [request] = await stack.met("unlisted")
    blind = Client(stack.client.service_client, interceptors=[NothingListed()])
    assert (await blind.count_workflows()).count == 0
    sweep = SweepActivities(Services(stack.settings)).sweep
    result = await ActivityEnvironment(client=blind).run(sweep, SweepRequest(grace_s=0))

    assert (result.killed, result.kept) == (0, 1)
    stack.engine.let_go()
    await stack.solved_once(request)


async def test_a_terminated_rollout_ends_with_its_sandbox(stack: Stack) -> None:
    """Its watcher ends agent and sandbox at once and closes the session; a live one goes on."""
    dead, live = await stack.met("terminated", 2)
    await stack.temporal_cli(
        *("workflow", "terminate", "--workflow-id", dead.workflow_id, "--reason", "test")
    )
    await until(lambda: not stack.box(dead, "agent").exists, "its sandbox is gone", SOON_S)
    await until(lambda: _is_closed(stack, dead), "its session is closed", SOON_S)

    assert stack.box(live, "agent").alive
    stack.engine.let_go()
    await stack.solved_once(live)
    await stack.nothing_left()


async def test_a_rollout_terminated_while_no_worker_ran_is_swept(stack: Stack) -> None:
    """The next worker finds its sandbox, kills it and closes its session, and leaves a live one."""
    dead, live = await stack.met("swept", 2)
    await stack.workers[0].kill()
    await stack.handle(dead).terminate()
    await stack.start_worker()
    await until(lambda: not stack.box(dead, "agent").exists, "its sandbox is gone", TWO_MINUTES_S)
    await until(lambda: _is_closed(stack, dead), "its session is closed", SOON_S)

    assert stack.box(live, "agent").alive
    stack.engine.let_go()
    await stack.solved_once(live)
    await stack.nothing_left()


async def test_the_scheduled_sweep_ends_it_too(stack: Stack) -> None:
    """The workflow that the schedule starts sweeps by itself, and says what it did."""
    [request] = await stack.met("scheduled")
    await stack.workers[0].kill()
    await stack.handle(request).terminate()
    await stack.start_worker()
    result = await stack.client.execute_workflow(
        temporal_names.REAPER,
        host_of(stack.settings),
        id="sweep-now",
        task_queue=temporal_names.WORKFLOWS_QUEUE,
        result_type=SweepReport,
    )

    assert (result.killed, result.kept) == (1, 0)
    await stack.nothing_left()


async def _is_closed(stack: Stack, request: RolloutRequest) -> bool:
    """Whether the session of its first attempt takes no more calls."""
    async with GatewayControl(stack.plan.gateway_url, load_secrets(stack.settings)) as control:
        return not (await control.get(stack.identity(request, "agent"))).open


async def test_a_terminated_rollout_started_again_takes_its_agent_over(stack: Stack) -> None:
    """Before any sweep: the same sandbox, the same process, no model call repeated."""
    [request] = await stack.met("taken-over")
    agents = stack.agents()
    await stack.handle(request).terminate()
    await stack.perdure.start_rollout(request)
    await stack.watched(request)

    assert stack.agents() == agents
    stack.engine.let_go()
    await stack.solved_once(request)


async def test_a_swept_rollout_started_again_is_a_new_attempt(stack: Stack) -> None:
    """A new sandbox gets a new session, which buys nothing that the old one had bought.

    The turn in flight at the end of the old sandbox may have come in time for the new one, or not.
    """
    [request] = await stack.met("swept-again")
    await stack.handle(request).terminate()
    await stack.sweep(grace_s=0)
    stack.engine.let_go()
    await stack.perdure.start_rollout(request)

    replayed = (await stack.episode(request)).trajectory.replayed_turns
    assert replayed in (3, 4)
    await stack.solved_once(request, attempt=2, replayed=replayed)
