"""A hosted API whose quota is exhausted: rollouts wait for the reset without a sandbox."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.cli.runs import stuck_rollouts
from perdure.cli.runs.rollout_progress import parked_rollouts
from perdure.engines import api_allowance
from perdure.engines.quota_resets import closed_accounts
from perdure.testing.local_gateway import LocalGateway
from perdure.types import ApiLimits, Outcome, RolloutRequest
from tests.stack.account_commands import AccountCommands
from tests.stack.gated_engine import TURNS
from tests.stack.quota_engine import QuotaEngine, hours
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

BOUGHT = 7
"""Calls before the quota is exhausted: the middle of two rollouts."""
RESETS_IN_S = 120.0
"""Longer than kill -9 of everything and its restart take on a busy host."""


async def _ask(gateway: LocalGateway, key: str, text: str = "hi") -> httpx.Response:
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
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


async def test_no_call_is_bought_outside_the_openhours(tmp_path: Path) -> None:
    """The session waits for the next opening, and the engine sees no call."""
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai", "open_hours": hours(opens_in_h=2)}
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
    async with running(tmp_path, hosted=engine, open_hours=hours(opens_in_h=2)) as stack:
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


# --- limits of the settings -----------------------------------------------------------------------


def _skip_at_the_end_of_the_day() -> None:
    if time.time() % 86400 > 86400 - 1200:
        pytest.skip("the day, and with it the limit's window, may end during the test")


async def test_gateways_share_the_limit_of_a_day(tmp_path: Path) -> None:
    """The third call of the day is not sent, whichever gateway gets it. Both say until when."""
    _skip_at_the_end_of_the_day()
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai", "limits": {"requests": {"day": 2}}}
        async with (
            LocalGateway(tmp_path, engine=named) as gateway,
            LocalGateway(tmp_path, engine=named) as other,
            asyncio.timeout(60),
        ):
            key = await gateway.open("s")
            answers = [await _ask(one, key, text) for one, text in
                       ((gateway, "a"), (other, "b"), (gateway, "c"), (other, "d"))]  # fmt: skip
            seen = await gateway.control.get("s")
            (closed,) = await closed_accounts(gateway.store, time.time())

    assert [one.status_code for one in answers] == [200, 200, 503, 503]
    assert engine.sold.total() == 2
    assert seen.waits is not None
    assert (seen.waits.until, seen.waits.reason) == (closed.resets_at, closed.reason)
    assert closed.resets_at % 86400 == 0
    assert closed.reason.startswith("the limit of 2 requests per day (engine.limits) is reached")
    assert closed.account == "policy at 127.0.0.1"


async def test_tokens_of_the_answers_count(tmp_path: Path) -> None:
    """The answer's usage reaches the limit, not only the estimate of the prompt."""
    _skip_at_the_end_of_the_day()
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai", "limits": {"output_tokens": {"day": 1}}}
        async with LocalGateway(tmp_path, engine=named) as gateway, asyncio.timeout(60):
            key = await gateway.open("s")
            answers = [await _ask(gateway, key, text) for text in ("a", "b")]

    assert [one.status_code for one in answers] == [200, 503]
    assert engine.sold.total() == 1


async def test_calls_wait_in_the_gateway_for_a_window_that_opens_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are answered. The session says what it waits for, and its agent's budget is not charged."""
    monkeypatch.setitem(api_allowance.WINDOWS_S, "minute", 4.0)
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai", "limits": {"requests": {"minute": 1}}}
        async with LocalGateway(tmp_path, engine=named) as gateway, asyncio.timeout(120):
            key = await gateway.open("s")
            asked = [asyncio.ensure_future(_ask(gateway, key, text)) for text in "abc"]
            waits = None
            while waits is None:
                waits = (await gateway.control.get("s")).waits
            answers = await asyncio.gather(*asked)
            after = await gateway.control.get("s")

    assert [one.status_code for one in answers] == [200] * 3
    assert "the limit of 1 requests per minute" in waits.reason
    assert (waits.until, after.waits) == (0.0, None)
    assert after.waiting_seconds >= 4


NO_CREDIT: dict[str, tuple[int, dict[str, Any]]] = {
    "OpenAI": (429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}),
    "Anthropic": (400, {"error": {"message": "Your credit balance is too low to access the API."}}),
    "OpenRouter": (402, {"error": {"message": "Insufficient credits", "code": 402}}),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_CREDIT)
async def test_an_account_without_credit_is_asked_again_later(tmp_path: Path, case: str) -> None:
    """The call is not repeated, the rollout does not fail, and after a top-up the next call is
    answered."""
    async with QuotaEngine() as engine:
        named = {"url": engine.url, "kind": "openai"}
        async with LocalGateway(tmp_path, engine=named) as gateway, asyncio.timeout(60):
            engine.no_credit = NO_CREDIT[case]
            key = await gateway.open("s")
            refused = await _ask(gateway, key)
            seen = await gateway.control.get("s")
            closed = await closed_accounts(gateway.store, time.time())
            engine.no_credit = None
            answered = await _ask(gateway, key)

    assert (refused.status_code, engine.refused, answered.status_code) == (503, 1, 200)
    assert (seen.refused, seen.waits is not None) == ("", True)
    assert seen.waits is not None
    assert seen.waits.until == pytest.approx(time.time() + 1800, abs=60)
    assert "Add credit to the account" in seen.waits.reason
    assert [(one.account, one.reason) for one in closed] == [
        ("policy at 127.0.0.1", seen.waits.reason)
    ]


@pytest.mark.longer
async def test_rollouts_stay_within_a_limit_through_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs use up the day's requests and park, even if kill -9 ends the gateway halfway. With a
    higher limit they continue by replay."""
    _skip_at_the_end_of_the_day()
    engine = QuotaEngine()
    async with running(tmp_path, hosted=engine, limits={"requests": {"day": BOUGHT}}) as stack:
        at_work = [await stack.start(run_id, max_attempts=1) for run_id in ("one", "two")]
        await until(lambda: engine.sold.total() >= 3, "some turns are bought")
        await stack.gateway.kill()
        await stack.recover()
        for request in at_work:
            await until(lambda: _is_parked(stack, request), f"{request.run_id} is parked")  # noqa: B023
        late = await stack.start("three", max_attempts=1)
        await until(lambda: _is_parked(stack, late), "the late one is parked")
        await stack.nothing_left()
        shown = await parked_rollouts(stack.client)
        bought = engine.sold.total()
        higher = ApiLimits(requests={"day": 100})
        stack.plan = replace(stack.plan, settings=stack.settings.changed(engine={"limits": higher}))
        await stack.kill_all(*stack.workers, stack.gateway)
        await stack.recover()
        opened = await AccountCommands(stack, monkeypatch, capsys).run("open")
        episodes = [await stack.episode(request) for request in (*at_work, late)]
        await stack.nothing_left()

    assert bought <= BOUGHT
    assert shown.startswith(f"3 rollouts parked without a sandbox: `the limit of {BOUGHT} requests")
    assert [one["account"] for one in opened["opened"]] == ["policy at 127.0.0.1"]
    assert opened["continued"] == 3
    assert [one.outcome for one in episodes] == [Outcome.RESOLVED] * 3
    assert [len(one.attempts) for one in episodes] == [2, 2, 1]
    assert engine.sold.total() <= 3 * TURNS + 2, "one more for each call that the kill cut off"


@pytest.mark.longer
async def test_nothing_is_judged_while_the_judges_account_has_no_credit(tmp_path: Path) -> None:
    """The judge's first refused call parks the grading, and the next one before its sandbox."""
    engine = QuotaEngine()
    judge = {"model": "policy", "criteria": [{"name": "small", "description": "It is small"}]}
    async with running(tmp_path, hosted=engine) as stack:
        engine.no_credit = NO_CREDIT["OpenRouter"]
        request = await stack.start("judged", agent="oracle", reward_model=judge, max_attempts=1)
        await until(lambda: _is_parked(stack, request), "the grading is parked")
        late = await stack.start("late", agent="oracle", reward_model=judge, max_attempts=1)
        await until(lambda: _is_parked(stack, late), "the late grading is parked")
        asked = engine.refused
        shown = await parked_rollouts(stack.client)
        for one in (request, late):
            await stack.handle(one).cancel()
        await stack.nothing_left()

    assert asked == 1
    assert shown.startswith(
        "2 rollouts parked without a sandbox: `the account is asked again at 20"
    )
