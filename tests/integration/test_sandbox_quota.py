"""A sandbox account without credits: rollouts wait for a top-up without a sandbox and continue."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import invoke
from perdure.cli.runs.rollout_progress import parked_rollouts
from perdure.types import Outcome, RolloutRequest
from tests import service_harness
from tests.service_harness import DAYTONA
from tests.stack.gated_engine import TURNS
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

SUSPENDED = {
    "match": DAYTONA.create,
    "status": 403,
    "body": {"message": "Organization is suspended: Depleted credits"},
    "times": None,
}


def _use(stack: Stack, patch: pytest.MonkeyPatch) -> None:
    """Let `perdure` commands of this process use the stack."""
    patch.setenv("PERDURE_HOME", str(stack.home))
    patch.setenv("PERDURE_STORE", stack.store.url)
    patch.setenv("TEMPORAL_ADDRESS", stack.client.service_client.config.target_host)
    patch.setenv("TEMPORAL_NAMESPACE", stack.client.namespace)


async def _accounts(capsys: pytest.CaptureFixture[str], command: str) -> Any:
    capsys.readouterr()
    code = await asyncio.to_thread(invoke, ["accounts", command, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


async def _is_parked(stack: Stack, request: RolloutRequest) -> bool:
    return bool((await stack.handle(request).query("state"))["stage"] == "parked")


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
        _use(stack, monkeypatch)
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
        listed = await _accounts(capsys, "list")
        server.faults.rules.clear()
        opened = await _accounts(capsys, "open")
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
