"""More rollouts than a host has seats: the others wait, without a sandbox, for as long as it takes."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from perdure.cli.runs.rollout_progress import current_step
from perdure.types import Outcome, RolloutRequest
from tests.slow_oracle import SlowOracle
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEATS = 2
ROLLOUTS = 5 * SEATS
SILENT_S = 5.0
"""A rollout takes a seat for longer than this, and the last one waits for many times this."""
AGENT = f"{SlowOracle.__module__}:{SlowOracle.__name__}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERDURE_SLOTS__AGENT", str(SEATS))
        async with running(tmp_path_factory.mktemp("full") / "stack", workers=0) as stack:
            await stack.start_worker("tests.hasty_worker", str(SILENT_S))
            yield stack


async def test_rollouts_wait_for_seats_longer_than_every_time_out(full: Stack) -> None:
    """Five times as many as seats: all are graded in their first attempt, never more at once."""
    asked = [full.request("full", sample_index=n, agent=AGENT) for n in range(ROLLOUTS)]
    for request in asked:
        await full.perdure.start_rollout(request)
    most = 0

    async def all_over() -> bool:
        nonlocal most
        most = max(most, sum(full.box(request, "agent").exists for request in asked))
        return all([await full.is_over(request) for request in asked])

    await until(all_over, "all are over")
    episodes = [await full.episode(request) for request in asked]

    assert [(one.outcome, len(one.attempts)) for one in episodes] == [
        (Outcome.RESOLVED, 1)
    ] * ROLLOUTS, full.last_words()
    assert most == SEATS
    await full.nothing_left()


async def test_a_rollout_without_a_seat_is_shown_as_waiting(full: Stack) -> None:
    """It has no sandbox; when a seat is free, it takes it."""
    seated = await full.met("seated", SEATS)
    waits = await full.start("waits")

    await until(lambda: _waits(full, waits), "it waits for a seat")
    state = await full.handle(waits).query("state")

    assert state["stage"] == "waiting"
    assert not full.box(waits, "agent").exists
    full.engine.let_go()
    for request in (*seated, waits):
        await full.solved_once(request)


async def test_a_cancelled_rollout_does_not_wait_for_its_seat(full: Stack) -> None:
    """It ends at once, and no sandbox is booted for it."""
    seated = await full.met("keeps", SEATS)
    waits = await full.start("gives-up")
    await until(lambda: _waits(full, waits), "it waits for a seat")
    await full.handle(waits).cancel()

    assert [one.provider for one in (await full.episode(waits)).attempts] == [""]
    full.engine.let_go()
    for request in seated:
        await full.solved_once(request)


async def test_a_full_host_captures_and_sweeps_beside_its_agents(full: Stack) -> None:
    """With every seat taken, a sweep runs at once and finds nothing to kill."""
    seated = await full.met("swept", SEATS)

    assert (await full.sweep(grace_s=0)).kept == SEATS
    full.engine.let_go()
    for request in seated:
        await full.solved_once(request)


async def test_a_restarted_worker_boots_nothing_beyond_its_seats(full: Stack) -> None:
    """kill -9 with every seat taken: the new worker watches those agents, and who waits goes on waiting."""
    seated = await full.met("survives", SEATS)
    waits = await full.start("after")
    await full.workers[0].kill()
    await full.start_worker("tests.hasty_worker", str(SILENT_S * 20))
    for request in seated:
        await full.watched(request, attempt=2)

    await until(lambda: _waits(full, waits), "it waits for a seat again")
    assert not full.box(waits, "agent").exists
    full.engine.let_go()
    for request in (*seated, waits):
        await full.solved_once(request)


async def _waits(stack: Stack, request: RolloutRequest) -> bool:
    line = await current_step(stack.client, request.workflow_id)
    return line.startswith("waits for a free seat on a host since ")
