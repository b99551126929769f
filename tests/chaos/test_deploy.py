"""A deploy and a rollback with worker processes of two builds, and agents in the middle of a turn."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from perdure.types import RolloutRequest
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import DEATH_S, Stack, running
from tests.stack.stack_process import Process
from tests.stack.wait_until import until
from tests.stack.worker_builds import make_current, start_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("stack"), workers=0, beat_s=DEATH_S) as stack:
        yield stack


async def _pids(stack: Stack, request: RolloutRequest) -> dict[str, set[int]]:
    """Activity -> worker processes that ran it to its end."""
    history = json.loads((await stack.handle(request).fetch_history()).to_json())
    types: dict[str, str] = {}
    found: dict[str, set[int]] = defaultdict(set)
    for event in history["events"]:
        if told := event.get("activityTaskScheduledEventAttributes"):
            types[event["eventId"]] = told["activityType"]["name"]
        if told := event.get("activityTaskCompletedEventAttributes"):
            found[types[told["scheduledEventId"]]].add(int(told["identity"].partition("@")[0]))
    return found


async def test_rollouts_in_flight_survive_a_deploy_and_a_rollback(shared: Stack) -> None:
    """Each is solved in its first attempt, on the build that began it, though neither build can read
    the other's verdicts; the agents of a killed worker are watched by the other build's meanwhile."""
    stack = shared
    old = await start_worker(stack, "v1")
    await make_current(stack, "v1")
    before = await stack.met("before", 2)
    agents = stack.agents()
    new = await start_worker(stack, "v2")
    await make_current(stack, "v2")
    deployed = await stack.met("deployed", 2)
    await old.kill()
    for request in before:
        await _watched_by(stack, request, new)

    assert agents < stack.agents()
    old = await start_worker(stack, "v1")
    await make_current(stack, "v1")
    [back] = await stack.met("rolled-back")
    stack.engine.let_go()
    for request in (*before, *deployed, back):
        await stack.episode(request)
    for request in (*before, *deployed, back):
        await stack.solved_once(request)
    for request in (*before, back):
        ran = await _pids(stack, request)
        assert "review_patch" not in ran
        assert ran["grade_in_fresh_sandbox"] == ran["emit_episode"] == {old.pid}
    for request in deployed:
        ran = await _pids(stack, request)
        assert ran["review_patch"] == ran["grade_in_fresh_sandbox"] == {new.pid}


async def _watched_by(stack: Stack, request: RolloutRequest, worker: Process) -> None:
    async def so() -> bool:
        return await stack.at(request, "run_agent") == worker.pid

    await until(so, "the other build's worker watches the agent")
