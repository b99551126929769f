"""Workers killed while a burst queues for an account: no slot is lost, none is used twice."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure.client import temporal_names
from perdure.rollouts.admission.permit_rules import Account
from perdure.settings.settings_tree import Settings
from tests import burst_checks, e2b_control_plane
from tests.stack.running_stack import DEATH_S, Stack
from tests.stack.wait_until import until

pytestmark = pytest.mark.temporal

BURST, LIVE, KILLS = 40, 6, 5


async def test_workers_killed_in_a_burst_leave_no_permit_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a worker five times while it boots and grades: all are graded, the account never
    holds more than it may, and in the end no sandbox and no permit is left."""
    said = f'{{"{e2b_control_plane.NAME}": {{"live": {LIVE}}}}}'
    async with burst_checks.capped(tmp_path, monkeypatch, live=LIVE, rate=100, said=said) as pair:
        stack, server = pair
        killing = asyncio.create_task(kills(stack, server))
        seen = await burst_checks.run_burst(
            *pair, BURST, limit_s=3600, sandbox=e2b_control_plane.NAME, heartbeat_timeout_s=DEATH_S
        )
        await killing
        await until(lambda: all_given_back(stack, server), "nothing is held", 60)

    assert (seen.graded, seen.errors) == (BURST, 0)
    assert seen.refused <= KILLS, seen  # what a dead worker was making comes up a moment later


async def kills(stack: Stack, server: Any) -> None:
    """Kills one worker at a time, each after a fixed share of the burst."""
    due = [number * BURST // (KILLS + 1) for number in range(1, KILLS + 1)]
    while due:
        await until(lambda: len(server.keys.all()) > due[0], f"{due[0]} are made", 3600)
        del due[0]
        victim = next(worker for worker in stack.workers if worker.alive)
        await victim.kill()
        await stack.start_worker()


async def all_given_back(stack: Stack, server: Any) -> bool:
    """No sandbox is left, and no permit is held."""
    keeper = temporal_names.account_id(
        e2b_control_plane.HollowE2B(Settings(home=stack.home)).account
    )
    state = await stack.client.get_workflow_handle(keeper).query("state", result_type=Account)
    return not server.sandboxes.all() and not state.permits
