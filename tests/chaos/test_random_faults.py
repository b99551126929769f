"""Acts that a seed draws from the full menu hit many rollouts at work: each gives what it must.

`make chaos SEEDS=1,2,3 ROLLOUTS=200` draws more than the default. With `--ray` (and the extra
`serving`) the engines run on Ray nodes, which are killed too.
"""

import json
import random
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from perdure.storage import store_keys
from perdure.types import RunRequest
from tests import loop_agent
from tests.chaos.random_faults import system_under_test as worlds
from tests.chaos.random_faults.expected_outcome import DUE, judge
from tests.chaos.random_faults.fault_menu import MENU
from tests.chaos.random_faults.system_under_test import World
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import DEATH_S, Stack
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 12
LATENCY_S = 0.2
CALLS_AN_ACT = 24
"""Model calls from the end of an act to the next one, on average."""
SWEPT_WITHIN_S = 150.0
"""A worker that lost its grading to another one on another host leaves a sandbox to the sweep."""
LAST = 0.95
"""After this share of the calls nothing breaks any more."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> AsyncIterator[World]:
    if missing := why_not_here():
        pytest.skip(missing)
    folder, ray = tmp_path_factory.mktemp("drawn"), pytestconfig.getoption("--ray")
    with pytest.MonkeyPatch.context() as patch:
        async with worlds.opened(folder, patch, ray=ray) as world:
            yield world


async def test_each_rollout_gives_what_it_must(shared: World, seed: int, rollouts: int) -> None:
    """Graded as its instance must be, each command run once, only cut turns are bought again."""
    world, stack = shared, shared.first
    await world.begin(random.Random(seed))
    stack.engine.latency_s = LATENCY_S
    run = _run(stack, seed, rollouts // len(DUE))
    asked = [run.rollout_request(ref, k) for ref in DUE for k in range(run.n_samples)]
    stack.requests += asked
    handle = await stack.perdure.start_run(run)
    acts = await _play(world, len(asked) * stack.engine.turns)
    summary = await handle.result()
    verdict = await judge(stack, asked, world.record)

    told = {
        "seed": seed,
        "rollouts": len(asked),
        "acts": acts,
        "not possible here": sorted(MENU.keys() - {*_possible(world)}),
        "killed in, all seeds": dict(world.record.killed_in),
        "agents killed": len(world.record.agents_killed),
        "crashed": verdict.crashed,
        "sandboxes taken": world.record.sandboxes_taken.total(),
        "calls": verdict.bought,
        "bought again": verdict.repeated_calls,
        "turns cut": verdict.in_flight,
        "attempts": dict(verdict.attempts),
        "wrong": verdict.wrong[:5],
    }
    print(json.dumps(told))
    assert not verdict.wrong, (told, stack.last_words())
    assert summary.rollouts == len(asked), summary
    manifest = json.loads((await stack.store.get(store_keys.manifest(run.run_id))).data)
    assert manifest["rollouts"] == len(asked)
    for host in world.hosts:
        await host.nothing_left(SWEPT_WITHIN_S)


def _run(stack: Stack, seed: int, samples: int) -> RunRequest:
    return RunRequest(
        run_id=f"drawn-{seed}",
        instances=tuple(DUE),
        n_samples=samples,
        concurrency=AT_ONCE,
        rollout={
            "agent": loop_agent.NAME,
            "agent_options": {"mark": stack.mark},
            "heartbeat_timeout_s": DEATH_S,
            "max_attempts": 8,
        },
    )


async def _play(world: World, calls: int) -> list[str]:
    """Acts while the run is at work, some calls apart; their names."""
    played: list[str] = []
    due = _gap(world)
    while due < LAST * calls:
        await until(partial(_has_made, world.first, due), f"{due:.0f} of {calls} calls are made")
        played.append(world.dice.choice(_possible(world)))
        print(f"{due / calls:.0%} {played[-1]}", flush=True)
        await MENU[played[-1]].play(world)
        due = world.first.engine.stats().calls + _gap(world)
    return played


def _gap(world: World) -> float:
    return world.dice.uniform(0, 2 * CALLS_AN_ACT)


def _possible(world: World) -> list[str]:
    return [name for name, act in MENU.items() if act.needs(world)]


def _has_made(stack: Stack, calls: float) -> bool:
    return stack.engine.stats().calls >= calls
