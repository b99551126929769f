"""Temporal forgets: a workflow is deleted, or the whole database is lost. The store remembers."""

import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure.stack import temporal_setup
from perdure.types import RolloutRequest
from tests.stack.running_stack import Stack
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_deleted_rollout_started_again_does_no_work(stack: Stack) -> None:
    """The episode in the store answers: no sandbox, no model call, not one file more."""
    request = await stack.start("deleted")
    first = await stack.episode(request)
    files = await stack.files(request)
    await stack.temporal_cli("workflow", "delete", "--yes", "--workflow-id", request.workflow_id)
    await until(lambda: _is_unknown(stack, request), "Temporal has forgotten it")
    stack.engine.forget()
    again = await (await stack.perdure.start_rollout(request)).result()

    assert again == first.ref(stack.store.url)
    assert stack.engine.stats().calls == 0
    assert await stack.files(request) == files


async def _is_unknown(stack: Stack, request: RolloutRequest) -> bool:
    try:
        await stack.handle(request).describe()
    except RPCError as error:
        return error.status is RPCStatusCode.NOT_FOUND
    return False


async def test_the_database_is_lost_in_the_middle_of_a_turn(stack: Stack) -> None:
    """A new server knows nothing; the same request takes the same agent over, and solves it."""
    [request] = await stack.met("database-lost")
    agents = stack.agents()
    await stack.temporal.kill()
    for path in stack.home.glob("temporal.db*"):
        path.unlink()
    await stack.start_temporal()
    await temporal_setup.register_search_attributes(stack.client)
    assert await _is_unknown(stack, request)
    await stack.perdure.start_rollout(request)
    await stack.watched(request)

    assert stack.agents() == agents
    stack.engine.let_go()
    await stack.solved_once(request)
