"""A gateway whose engine refuses calls: no status is handed to an agent as its own fault."""

import asyncio
from pathlib import Path

import httpx
import pytest

from perdure.engines.clients import hosted_requests
from perdure.engines.pool.completion_call import GenerateCall
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine

SCRIPTS = {"default": {"turns": [{"content": "Hello."}]}}
STATUSES = [status for status in range(301, 600) if status != 304]
"""All that is no success. 304 has no body."""
DISTINCT = [301, 400, 401, 403, 404, 408, 409, 413, 422, 429, 499, 500, 502, 503, 504, 599]
"""Those that code, here or in a client library, could treat in their own way."""
STUCK_S = 200.0


def _at_once(call: GenerateCall, retry_after: float | None) -> float:
    return 0.0


async def _ask(gateway: LocalGateway, key: str) -> httpx.Response:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        return await http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )


@pytest.mark.parametrize("kind", ["vllm", "openai"])
@pytest.mark.parametrize(
    "statuses",
    [DISTINCT, pytest.param(STATUSES, marks=pytest.mark.longer)],
    ids=["distinct", "all"],
)
async def test_no_status_reaches_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: list[int], kind: str
) -> None:
    """Whatever the engine, or a proxy in front of it, answers once: the agent gets a completion, and
    nothing is held against the rollout. From a hosted API, 402 says that the account has no credit, and
    the rollout is parked: `test_quota.py`."""
    monkeypatch.setattr(GenerateCall, "pause", _at_once)
    monkeypatch.setattr(hosted_requests, "FIRST_PAUSE_S", 0.0)
    async with (
        ScriptedEngine(SCRIPTS) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": kind}) as gateway,
        asyncio.timeout(STUCK_S),
    ):
        found = {}
        for status in statuses:
            if (kind, status) == ("openai", httpx.codes.PAYMENT_REQUIRED):
                continue
            engine.reset(kind="status", status=status, times=1)
            answer = await _ask(gateway, await gateway.open(f"s{status}"))
            summary = await gateway.control.close(f"s{status}")
            broke = (summary.unanswered, summary.refused, engine.stats().faults["status"])
            found[status] = answer.status_code, summary.turns, *broke

    assert {status: what for status, what in found.items() if what != (200, 1, "", "", 1)} == {}


async def test_a_call_without_an_answer_is_told_until_its_chain_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer to a sub-agent or to a side request makes up for nothing that the agent itself lacks;
    the agent's own next answer makes up for all."""
    monkeypatch.setattr("perdure.engines.pool.engine_pool.MOST_MOVES", 0)
    side = {"x-claude-code-agent-id": "helper"}
    async with (
        ScriptedEngine(SCRIPTS) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        asyncio.timeout(STUCK_S),
    ):
        key = await gateway.open("s")

        async def ask(text: str, **headers: str) -> int:
            body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}
            sent = await http.post("/v1/messages", json=body, headers={"x-api-key": key, **headers})
            return sent.status_code

        async def unanswered() -> str:
            return (await gateway.control.get("s")).unanswered

        assert await ask("a") == 200
        engine.control(kind="status", status=507)
        lost = await ask("b")
        engine.control(kind=None)
        before = await unanswered()
        helped = await ask("c", **side)
        between = await unanswered()
        went_on = await ask("d")
        after = await unanswered()

    assert (lost, helped, went_on) == (529, 200, 200)
    assert "answered 507" in before
    assert (between, after) == (before, "")


async def test_a_call_that_its_agent_has_left_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a policy could discard its episode with a call that it does not wait for."""
    monkeypatch.setattr("perdure.engines.pool.engine_pool.MOST_MOVES", 1)
    monkeypatch.setattr(GenerateCall, "pause", lambda *_: 1.5)
    async with (
        ScriptedEngine(SCRIPTS) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
        asyncio.timeout(STUCK_S),
    ):
        key = await gateway.open("s")
        assert (await _ask(gateway, key)).status_code == 200
        engine.control(kind="status", status=520)
        body = {"model": "policy", "messages": [{"role": "user", "content": "left"}]}
        with pytest.raises(httpx.ReadTimeout):
            await http.post(
                "/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {key}"},
                timeout=0.5,
            )
        while engine.stats().faults["status"] < 2:
            await asyncio.sleep(0.02)
        summary = await gateway.control.close("s")

    assert (summary.turns, summary.unanswered) == (1, "")
