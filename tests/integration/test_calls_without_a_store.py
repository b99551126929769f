"""The store is away while a gateway that does not hold the session gets a model call: the call waits."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from perdure.gateway import session_manager
from perdure.gateway.base import SessionSummary
from perdure.rollouts.activity_messages import AgentRun
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.gateway_session.gateway_session import AgentSession
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import AgentEnd
from tests.stack.wait_until import until
from tests.unit.gateway.unsteady_store import UnsteadyStore

SCRIPTS = {"default": {"turns": [{"content": "Hello."}]}}
SESSION = "s"


class Host:
    """Two gateways of one pool over one store."""

    def __init__(self, store: UnsteadyStore, holder: LocalGateway, other: LocalGateway) -> None:
        self.store, self.holder, self.other = store, holder, other

    async def ask(self, key: str, text: str = "hi", *, gives_up_after: float = 60.0) -> int:
        """The status of a call to the gateway that does not hold the session."""
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=self.other.url, timeout=gives_up_after) as http:
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        return answer.status_code

    async def agent_run(self, activity_attempt: int = 1) -> AgentRun:
        """What the agent stage makes of the session, after asking the gateway that holds it."""

        async def read(name: str, model: object) -> None:
            return None

        fields: dict[str, Any] = {
            "services": SimpleNamespace(gateway=self.holder.control, unwritten_away=set()),
            "activity_attempt": SimpleNamespace(number=activity_attempt),
            "agent_identity": SESSION,
            "key": str,
            "read": read,
        }
        closed = await AgentSession(cast(Job, SimpleNamespace(**fields))).close()
        return AgentRun(end=AgentEnd.FINISHED, turns=closed.turns, unanswered=closed.unanswered)

    async def ask_in_vain(self) -> None:
        """A call waits for the store for longer than agents' own clients do. Then the store is back."""
        key = await self.holder.open(SESSION)
        self.store.away = True
        with pytest.raises(httpx.ReadTimeout):
            await self.ask(key, gives_up_after=1.0)
        self.store.away = False

    async def look(self) -> SessionSummary:
        return await self.holder.control.get(SESSION)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    store = UnsteadyStore()
    settings: dict[str, Any] = {"store": store, "secret": "s" * 32}
    async with ScriptedEngine(SCRIPTS) as engine:
        settings["engine"] = {"url": engine.url, "kind": "vllm"}
        async with (
            LocalGateway(tmp_path / "holder", **settings) as holder,
            LocalGateway(tmp_path / "other", **settings) as other,
            asyncio.timeout(100),
        ):
            yield Host(store, holder, other)


@pytest.mark.longer
async def test_a_call_is_answered_when_the_store_is_back(host: Host) -> None:
    """An agent that does not repeat its calls gets no error, and its waiting is counted."""
    key = await host.holder.open(SESSION)
    host.store.away = True
    call = asyncio.create_task(host.ask(key))
    await until(
        lambda: call.done() or host.store.calls["get"] + host.store.calls["list"] > 20,
        "the gateway has tried more than once",
    )
    host.store.away = False

    assert await call == 200
    assert (await host.look()).waiting_seconds > 0
    assert (await host.agent_run()).broke == ""


async def test_an_agent_that_gave_up_meanwhile_has_no_verdict(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that the stage asks learns of its call from the journal."""
    monkeypatch.setattr(session_manager, "LONG_WAIT_S", 0.1)
    await host.ask_in_vain()

    async def noted() -> str:
        return (await host.look()).unanswered

    await until(noted, "the gateway has noted the call")
    assert "the store is away" in (await host.agent_run()).broke


async def test_a_stage_that_goes_on_when_the_store_is_back_awaits_the_notes(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's end and the return of the store may come at once: the gateway needs a moment."""
    monkeypatch.setattr(session_manager, "LONG_WAIT_S", 0.1)
    await host.ask_in_vain()

    assert "the store is away" in (await host.agent_run(activity_attempt=2)).broke


async def test_a_call_that_was_left_early_counts_for_nothing(host: Host) -> None:
    """Otherwise a policy could discard its episode with a call that it does not wait for."""
    key = await host.holder.open(SESSION)
    assert await host.ask(key) == 200
    host.store.away = True
    with pytest.raises(httpx.ReadTimeout):
        await host.ask(key, "left", gives_up_after=0.5)
    host.store.away = False

    async def ended() -> bool:
        async with httpx.AsyncClient(base_url=host.other.url) as http:
            return "client_closed_request" in (await http.get("/metrics")).text

    await until(ended, "the other gateway has dropped the call")
    run = await host.agent_run()

    assert (run.turns, run.broke) == (1, "")
