"""Whole rollouts whose sandbox has no way to the gateway but a relay, and whose worker is killed."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.cli import readiness
from perdure.sandboxes.relay import CARRIERS
from tests import stack as stacks
from tests.stack import Process, Stack

pytestmark = pytest.mark.temporal

HELD = 3
"""The turn in which the worker dies: the relay holds a call, the engine has not answered it."""


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    if missing := stacks.why_not_here():
        pytest.skip(missing)
    async with stacks.running(tmp_path / "stack") as stack:
        yield stack


async def start_worker(stack: Stack, carrier: str) -> Process:
    spec = stack.plan.worker()
    spec = replace(spec, env={**spec.env, "PERDURE_GATEWAY_REACH": carrier})
    process = stack.spawn(spec)
    await readiness.wait_for_pollers(stack.client, process.pid)
    return process


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_killed_worker_loses_no_relayed_call(stack: Stack, carrier: str) -> None:
    """kill -9 mid-call: another worker serves the same relay; solved, no turn sampled twice."""
    for worker in stack.workers:
        await worker.kill()
    first = await start_worker(stack, carrier)
    stack.engine.hold(HELD)
    request = await stack.start(f"relayed-{carrier}")
    await stack.held(request)
    await first.kill()
    await start_worker(stack, carrier)
    await stack.watched(request, attempt=2)
    stack.engine.let_go()

    await stack.solved_once(request)
