"""Acts that a seed draws from the full menu hit many rollouts at work: each gives what it must.

`make chaos SEEDS=1,2,3 ROLLOUTS=200` draws more than the default.
"""

import json
import logging
import os
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from perdure.storage import keys
from perdure.types import RunRequest
from tests import loop_agent
from tests.chaos.drawn.menu import MENU, World
from tests.chaos.drawn.oracle import judge
from tests.s3_proxy import S3Proxy
from tests.s3_server import S3Server
from tests.stack.host import why_not_here
from tests.stack.instances import INSTANCE
from tests.stack.stack import DEATH_S, Stack, running
from tests.stack.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 12
LATENCY_S = 0.2
CALLS_AN_ACT = 24
"""Model calls between two acts, on average."""
STAGES = ("boot_sandbox", "run_agent", "capture_diff", "grade_in_fresh_sandbox", "emit_episode")
DISK = "size=600m"


@pytest.fixture
def disk(tmp_path: Path) -> Path | None:
    """A small disk for the home; None where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", DISK, "perdure-chaos", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        return None
    return folder


@pytest_asyncio.fixture(loop_scope="module")
async def world(
    tmp_path: Path, disk: Path | None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    if missing := why_not_here():
        pytest.skip(missing)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "dummy")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "dummy")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = S3Server()
    proxy = S3Proxy(server.url)
    async with httpx.AsyncClient() as client:
        (await client.put(f"{server.url}/chaos")).raise_for_status()
    home = (disk or tmp_path) / "home"
    try:
        async with running(
            home, store="s3://chaos", s3_url=proxy.url, wired=True, beat_s=DEATH_S
        ) as stack:
            stack.engine.latency_s = LATENCY_S
            yield World(stack, proxy, disk, random.Random(0))
            proxy.heal()
    finally:
        proxy.close()
        server.close()
        if disk is not None:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def test_each_rollout_gives_what_it_must(world: World, seed: int, rollouts: int) -> None:
    """All graded right, each command run once, turns bought again at most those in flight."""
    stack, dice = world.stack, random.Random(seed)
    world.dice = dice
    run = _run(stack, seed, rollouts)
    stack.requests += [run.rollout_request(INSTANCE, k) for k in range(rollouts)]
    calls = rollouts * stack.engine.turns
    names = [name for name, act in MENU.items() if world.disk or not act.needs_disk]
    handle = await stack.perdure.start_run(run)
    played: list[str] = []
    hit: Counter[str] = Counter()
    for share in sorted(dice.random() * 0.97 for _ in range(max(3, calls // CALLS_AN_ACT))):
        await until(partial(_has_made, stack, share * calls), f"{share:.0%} of the calls are made")
        name = dice.choice(names)
        hit += await _stages(stack)
        played.append(name)
        await MENU[name].play(world)
    summary = await handle.result()
    verdict = await judge(
        stack,
        stack.requests,
        interruptions=sum(MENU[name].buys_again for name in played),
        agents_killed=world.agents_killed,
    )

    told = {
        "seed": seed,
        "rollouts": rollouts,
        "acts": played,
        "stages hit": dict(hit),
        "calls": verdict.bought,
        "bought again": verdict.bought_again,
        "attempts": dict(verdict.attempts),
        "wrong": verdict.wrong[:5],
    }
    print(json.dumps(told))
    assert not verdict.wrong, (told, stack.last_words())
    assert summary["rollouts"] == rollouts, summary
    assert verdict.bought_again <= AT_ONCE * len(played), told
    manifest = json.loads((await stack.store.get(keys.manifest(run.run_id))).data)
    assert manifest["rollouts"] == rollouts
    await stack.nothing_left()


def _run(stack: Stack, seed: int, rollouts: int) -> RunRequest:
    return RunRequest(
        run_id=f"drawn-{seed}",
        instances=(INSTANCE,),
        n_samples=rollouts,
        concurrency=AT_ONCE,
        rollout={
            "agent": loop_agent.NAME,
            "agent_options": {"mark": stack.mark},
            "heartbeat_timeout_s": DEATH_S,
            "max_attempts": 8,
        },
    )


def _has_made(stack: Stack, calls: float) -> bool:
    return stack.engine.stats().calls >= calls


async def _stages(stack: Stack) -> Counter[str]:
    """The stages of the open rollouts at this moment."""
    found: Counter[str] = Counter()
    query = "ExecutionStatus = 'Running' AND WorkflowType = 'RolloutWorkflow'"
    open_ids = {w.id async for w in stack.client.list_workflows(query, limit=3 * AT_ONCE)}
    for request in stack.requests:
        if request.workflow_id in open_ids and (pending := await stack.pending(request)):
            found[pending.activity_type.name] += 1
    return found
