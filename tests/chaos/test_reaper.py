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

from activities.sweep_sandboxes import SweepSandboxes
from perdure.client import names
from perdure.home import host_of
from perdure.rollouts.messages import SweepRequest
from perdure.rollouts.services import Services
from perdure.sandboxes.reaper import SweepReport
from tests.stack.stack import Stack

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
    stack.engine.hold(3)
    request = await stack.start("unlisted")
    await stack.held(request)
    blind = Client(stack.client.service_client, interceptors=[NothingListed()])
    assert (await blind.count_workflows()).count == 0
    sweep = SweepSandboxes(Services(stack.settings)).sweep
    result = await ActivityEnvironment(client=blind).run(sweep, SweepRequest(grace_s=0))

    assert (result.killed, result.kept) == (0, 1)
    stack.engine.let_go()
    await stack.solved_once(request)


async def test_a_terminated_rollouts_sandbox_is_swept_and_a_live_ones_is_not(stack: Stack) -> None:
    """Agent and sandbox of the terminated one are gone; the live one is solved undisturbed."""
    stack.engine.hold(3)
    dead, live = await stack.start("terminated"), await stack.start("alive")
    await stack.held(dead, live)
    await stack.temporal_cli(
        *("workflow", "terminate", "--workflow-id", dead.workflow_id, "--reason", "test")
    )
    first = await stack.sweep(grace_s=0)

    assert (first.killed, first.kept) == (1, 1)
    assert stack.box(live, "agent").alive
    assert not stack.box(dead, "agent").exists
    stack.engine.let_go()
    await stack.solved_once(live)


async def test_a_young_sandbox_is_not_judged(stack: Stack) -> None:
    """The scheduled sweep leaves what may still be being made; the workflow itself runs through."""
    stack.engine.hold(3)
    request = await stack.start("young")
    await stack.held(request)
    await stack.handle(request).terminate()
    host = host_of(stack.settings)
    result = await stack.client.execute_workflow(
        names.REAPER,
        host,
        id="sweep-now",
        task_queue=names.WORKFLOWS_QUEUE,
        result_type=SweepReport,
    )

    assert (result.killed, result.kept) == (0, 1)
    assert (await stack.sweep(grace_s=0)).killed == 1
    await stack.nothing_left()


async def test_a_terminated_rollout_started_again_takes_its_agent_over(stack: Stack) -> None:
    """Before any sweep: the same sandbox, the same process, no model call repeated."""
    stack.engine.hold(3)
    request = await stack.start("taken-over")
    await stack.held(request)
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
    stack.engine.hold(3)
    request = await stack.start("swept-again")
    await stack.held(request)
    await stack.handle(request).terminate()
    await stack.sweep(grace_s=0)
    stack.engine.let_go()
    await stack.perdure.start_rollout(request)

    replayed = (await stack.episode(request)).trajectory.replayed_turns
    assert replayed in (3, 4)
    await stack.solved_once(request, attempt=2, replayed=replayed)
