"""A sandbox account without credits: rollouts wait for a top-up without a sandbox and continue."""

import time
from pathlib import Path

import pytest

from perdure.cli.runs.rollout_progress import parked_rollouts
from perdure.types import Outcome, RolloutRequest
from tests import service_harness
from tests.service_harness import DAYTONA
from tests.stack.account_commands import AccountCommands
from tests.stack.gated_engine import TURNS
from tests.stack.host_requirements import why_not_here
from tests.stack.quota_engine import hours
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

SUSPENDED = {
    "match": DAYTONA.create,
    "status": 403,
    "body": {"message": "Organization is suspended: Depleted credits"},
    "times": None,
}


async def _is_parked(stack: Stack, request: RolloutRequest) -> bool:
    return bool((await stack.handle(request).query("state"))["stage"] == "parked")


@pytest.mark.longer
async def test_rollouts_wait_for_credits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Credits end before a grading and before a boot. One refused create parks all rollouts of the
    account, and after a top-up they continue: no attempt is used up, no turn is bought twice."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with (
        service_harness.serving(DAYTONA, tmp_path / "server", monkeypatch) as (server, _),
        running(tmp_path / "stack") as stack,
    ):
        accounts = AccountCommands(stack, monkeypatch, capsys)
        stack.engine.hold(TURNS - 1)
        played = await stack.start("played", sandbox="daytona", max_attempts=1)
        await stack.held(played)
        server.faults.add([SUSPENDED])
        stack.engine.let_go()
        await until(lambda: _is_parked(stack, played), "the grading is parked")
        late = await stack.start("late", sandbox="daytona", max_attempts=1)
        await until(lambda: _is_parked(stack, late), "the late one is parked")
        shown = await parked_rollouts(stack.client)
        (rule,) = server.faults.rules
        refused, alive = rule.hits, server.sandboxes.all()
        listed = await accounts.run("list")
        server.faults.rules.clear()
        opened = await accounts.run("open")
        episodes = [await stack.episode(request) for request in (played, late)]
        left = server.sandboxes.all()

    assert (refused, alive) == (1, [])
    assert shown.startswith("2 rollouts parked without a sandbox: `daytona is asked again at 20")
    assert [one["account"] for one in listed] == ["daytona"]
    assert "Depleted credits" in listed[0]["reason"]
    assert opened == {"opened": listed, "continued": 2}
    assert [(one.outcome, len(one.attempts)) for one in episodes] == [(Outcome.RESOLVED, 1)] * 2
    assert left == []
    assert stack.engine.turns == TURNS


async def test_no_sandbox_boots_outside_the_hours_of_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rollouts are parked until the opening, and the list of accounts says why."""
    if missing := why_not_here():
        pytest.skip(missing)
    closed = {"daytona": hours(opens_in_h=2)}
    async with (
        service_harness.serving(DAYTONA, tmp_path / "server", monkeypatch) as (server, _),
        running(tmp_path / "stack", sandbox={"open_hours": closed}) as stack,
    ):
        request = await stack.start("night", sandbox="daytona", max_attempts=1)
        await until(lambda: _is_parked(stack, request), "the rollout is parked")
        shown = await parked_rollouts(stack.client)
        listed = await AccountCommands(stack, monkeypatch, capsys).run("list")
        await stack.handle(request).cancel()
        await stack.nothing_left()
        alive = server.sandboxes.all()

    assert alive == []
    assert shown.startswith("1 rollout parked without a sandbox: `daytona is used at")
    assert [one["account"] for one in listed] == ["daytona"]
    assert "sandbox.open_hours" in listed[0]["reason"]
    assert 3500 < listed[0]["resets_at"] - time.time() < 7300
