"""A run of groups, while processes die at random: nothing is lost, nothing is done twice."""

import json
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.storage import keys
from perdure.types import RunRequest
from tests import loop_agent
from tests.stack.host import why_not_here
from tests.stack.instances import INSTANCE
from tests.stack.stack import Stack, running
from tests.stack.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS, SAMPLES, LATENCY_S = 12, 12, 0.15
CALLS = TURNS * SAMPLES
KILL_AT = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Shares of all model calls after which something dies."""


@pytest_asyncio.fixture(loop_scope="module")
async def long_stack(tmp_path: Path) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path / "home", turns=TURNS) as stack:
        yield stack


def _is_at(stack: Stack, share: float) -> bool:
    return stack.engine.stats().calls >= share * CALLS


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_deaths(long_stack: Stack, seed: int) -> None:
    """After each share of the calls a random process gets signal 9: all solved, each turn once.

    Calls bought again are at most those in flight when a gateway died.
    """
    stack, dice = long_stack, random.Random(seed)
    stack.engine.latency_s = LATENCY_S
    run = RunRequest(
        run_id=f"soak-{seed}",
        instances=(INSTANCE,),
        n_samples=SAMPLES,
        concurrency=SAMPLES,
        rollout={
            "agent": loop_agent.NAME,
            "agent_options": {"mark": stack.mark},
            "heartbeat_timeout_s": 3,
        },
    )
    stack.requests += [run.rollout_request(INSTANCE, k) for k in range(SAMPLES)]
    handle = await stack.perdure.start_run(run)
    gateways = 0
    for share in KILL_AT:
        await until(partial(_is_at, stack, share), f"{share:.0%} of the calls are made")
        victim = dice.choice(["worker", "gateway", "temporal", "all"])
        gateways += victim in ("gateway", "all")
        named = {"worker": stack.workers, "gateway": [stack.gateway], "temporal": [stack.temporal]}
        everything = [*stack.workers, stack.gateway, stack.temporal]
        await stack.kill_all(*named.get(victim, everything))
        await stack.recover()
    summary = await handle.result()

    assert (summary["rollouts"], summary["resolved"]) == (SAMPLES, SAMPLES), summary
    for request in stack.requests:
        await stack.solved_once(request, again=gateways)
    bought_again = stack.engine.stats().calls - CALLS
    print(f"seed {seed}: {gateways} gateways died, {bought_again} of {CALLS} calls bought again")
    assert bought_again <= gateways * SAMPLES
    manifest = json.loads((await stack.store.get(keys.manifest(run.run_id))).data)
    assert (manifest["rollouts"], manifest["mean_reward"]) == (SAMPLES, 1.0)
