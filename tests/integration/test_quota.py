"""A hosted API whose quota is exhausted: rollouts wait for the reset without a sandbox."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from perdure.cli.runs import stuck_rollouts
from perdure.cli.runs.rollout_progress import parked_rollouts
from perdure.engines.quota_resets import closed_accounts
from perdure.testing.local_gateway import LocalGateway
from perdure.types import Outcome, RolloutRequest
from tests.stack.gated_engine import TURNS
from tests.stack.quota_engine import QuotaEngine
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

BOUGHT = 7
"""Calls before the quota is exhausted: the middle of two rollouts."""
RESETS_IN_S = 120.0
"""Longer than kill -9 of everything and its restart take on a busy host."""


async def _ask(gateway: LocalGateway, key: str) -> httpx.Response:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        return await http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )


async def test_all_gateways_know_the_reset(tmp_path: Path) -> None:
    """The call fails at once, without a repeat, and the next answer clears the wait."""
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai"}
        async with (
            LocalGateway(tmp_path, engine=named) as gateway,
            LocalGateway(tmp_path, engine=named) as other,
            asyncio.timeout(60),
        ):
            engine.quota, engine.resets_at = 0, (resets_at := time.time() + 7200)
            key = await gateway.open("s")
            refused = await _ask(gateway, key)
            seen = await other.control.get("s")
            engine.resets_at = 0.0
            answered = await _ask(gateway, key)
            after = await other.control.get("s")

    assert (refused.status_code, answered.status_code) == (503, 200)
    assert seen.waits is not None
    assert seen.waits.until == pytest.approx(resets_at, abs=60)
    assert "the quota resets at 20" in seen.waits.reason
    assert "hit your daily limit" in seen.waits.reason
    assert (after.waits, after.turns) == (None, 1)


async def test_a_short_wait_stays_in_the_gateway(tmp_path: Path) -> None:
    """The agent sees a slow answer: a sandbox that idles for seconds is cheaper than a boot."""
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai"}
        async with LocalGateway(tmp_path, engine=named) as gateway, asyncio.timeout(60):
            engine.quota, engine.resets_at = 0, time.time() + 1
            answered = await _ask(gateway, await gateway.open("s"))

    assert answered.status_code == 200


async def test_no_call_is_bought_outside_the_open_hours(tmp_path: Path) -> None:
    """The session waits for the next opening, and the engine sees no call."""
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai", "open_hours": _hours(opens_in_h=2)}
        async with LocalGateway(tmp_path, engine=named) as gateway, asyncio.timeout(60):
            refused = await _ask(gateway, await gateway.open("s"))
            seen = await gateway.control.get("s")
            closed = await closed_accounts(gateway.store, time.time())

    assert (refused.status_code, engine.sold.total()) == (503, 0)
    assert seen.waits is not None
    assert 3500 < seen.waits.until - time.time() < 7300
    assert "engine.open_hours" in seen.waits.reason
    assert [one.reason for one in closed] == [seen.waits.reason]


@pytest.mark.longer
async def test_rollouts_outside_the_open_hours_boot_no_sandbox(tmp_path: Path) -> None:
    """They are parked until the opening. A rollout without a model does not wait."""
    engine = QuotaEngine()
    async with running(tmp_path, hosted=engine, open_hours=_hours(opens_in_h=2)) as stack:
        request = await stack.start("day", max_attempts=1)
        await until(lambda: _is_parked(stack, request), "the rollout is parked")
        story = (await stack.handle(request).query("state"))["story"]
        gold = await stack.episode(await stack.start("gold", agent="oracle"))
        shown = await parked_rollouts(stack.client)
        await stack.handle(request).cancel()
        await stack.nothing_left()

    assert gold.outcome is Outcome.RESOLVED
    assert shown.startswith("1 rollout parked without a sandbox: `models are called at")
    assert not any("sandbox up" in line for line in story)
    assert engine.sold.total() == 0


def _hours(opens_in_h: int) -> str:
    """Open for four hours, beginning at the full hour before `opens_in_h` hours have passed."""
    begin = int(time.time() // 3600) + opens_in_h
    return f"{begin % 24:02}:00-{(begin + 4) % 24:02}:00"


async def _is_parked(stack: Stack, request: RolloutRequest) -> bool:
    return bool((await stack.handle(request).query("state"))["stage"] == "parked")


@pytest.mark.longer
async def test_rollouts_of_an_exhausted_account_wait_without_sandboxes(tmp_path: Path) -> None:
    """Two runs park together, and a third one does not boot. They survive kill -9 of the worker and
    of Temporal, and continue by replay: no turn is bought twice, no attempt is used up."""
    engine = QuotaEngine()
    async with running(tmp_path, hosted=engine, park_after_s=1) as stack:
        engine.quota, engine.resets_at = BOUGHT, time.time() + RESETS_IN_S
        at_work = [await stack.start(run_id, max_attempts=1) for run_id in ("one", "two")]
        for request in at_work:
            await until(lambda: _is_parked(stack, request), f"{request.run_id} is parked")  # noqa: B023
        late = await stack.start("three", max_attempts=1)
        await until(lambda: _is_parked(stack, late), "the late one is parked")
        await stack.nothing_left()
        shown = await parked_rollouts(stack.client)
        stuck = (await stuck_rollouts.find(stack.client, stack.store, None)).stuck
        parked_before_reset = time.time() < engine.resets_at
        await stack.kill_all(*stack.workers, stack.temporal)
        await stack.recover()
        episodes = [await stack.episode(request) for request in (*at_work, late)]
        await stack.nothing_left()

    assert parked_before_reset, "the host was too slow for this test"
    assert shown.startswith("3 rollouts parked without a sandbox: `the quota resets at 20")
    assert all("the quota resets at 20" in one.reason.why for one in stuck)
    assert len(stuck) == 3
    assert [one.outcome for one in episodes] == [Outcome.RESOLVED] * 3
    assert [len(one.attempts) for one in episodes] == [2, 2, 1]
    assert dict(engine.sold) == dict.fromkeys(range(TURNS), 3)
