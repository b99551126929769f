"""What `perdure run` and `watch` print while a run is open."""

import asyncio
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from perdure.cli.runs import run_follower
from perdure.cli.runs.run_tables import View
from perdure.client.sdk import Perdure
from perdure.rollouts.activity_messages import Booted
from perdure.types import RunRequest
from tests.workflows.scripted_stages import Stages


async def test_a_step_that_keeps_failing_is_named(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no rollout finishes, the line names the failing step and its last error."""
    monkeypatch.setattr(run_follower, "ASK_AFTER_S", 0.0)
    told: list[str] = []

    async def refused(attempt: Any) -> Booted:
        if any("boot_sandbox, try" in line for line in told):
            return Booted(uri="file:///x")
        raise ApplicationError("E2B: connection refused", type="ControlPlaneError")

    stages.instances = ("toy/add-1",)
    stages.override["boot_sandbox"] = refused
    run = await Perdure(client).start_run(
        RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
    )

    def show(view: View) -> None:
        told.append(view.trouble)

    async with asyncio.timeout(60):  # one that is never told would be tried for ever
        await run_follower.follow(run, show)

    assert any("add-1/0: boot_sandbox, try" in t and t.endswith("connection refused") for t in told)


async def test_the_last_state_of_a_run_is_shown(client: Client, stages: Stages) -> None:
    """The panel of a run among other runs shows its final state, not the one before it."""
    stages.instances = ("toy/add-1", "toy/add-2")
    seen: list[View] = []
    run = await Perdure(client).start_run(
        RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
    )
    await run_follower.follow(run, seen.append)

    assert (seen[-1].progress.state, seen[-1].progress.done) == ("done", 2)
