"""How a stage opens its agent's session: in one request, unless an earlier try may have opened
it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound, StoreUnavailable
from perdure.gateway.base import SessionSpec, SessionSummary
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.gateway_session.gateway_session import AgentSession
from perdure.types import Caps, RolloutRequest, Sampling
from tests.unit.gateway.unsteady_store import UnsteadyStore

SUMMARY = SessionSummary(session_id="s", open=True)
AFTER_ONE_TURN = SessionSummary(session_id="s", open=True, turns=1)


class Gateway:
    """A gateway with at most one session, which records each request in `asked`."""

    def __init__(self, *, is_open: bool, refuses: bool = False) -> None:
        self.is_open, self.refuses = is_open, refuses
        self.is_away = False
        self.asked: list[str] = []

    async def open(self, spec: SessionSpec) -> SessionSummary:
        self.asked.append("open")
        if self.refuses:
            raise ConfigurationError("refused")
        return SUMMARY

    async def get(self, session_id: str) -> SessionSummary:
        self.asked.append("get")
        if not self.is_open:
            raise NotFound(session_id)
        return SUMMARY

    async def look(self, session_id: str) -> SessionSummary:
        return await self.close(session_id)

    async def close(self, session_id: str) -> SessionSummary:
        if self.is_away:
            raise GatewayUnavailable("no answer")
        return SUMMARY


class Session(AgentSession):
    async def _spec(self) -> SessionSpec:
        return SessionSpec(session_id="s", turns_key="t")


def session(gateway: Gateway, try_number: int, store: UnsteadyStore | None = None) -> Session:
    store = store or UnsteadyStore()

    async def read(name: str, model: Any) -> Any:
        data = store.objects.get(name)
        return None if data is None else model.model_validate_json(data)

    fields: dict[str, Any] = {
        "services": SimpleNamespace(gateway=gateway, store=store, unwritten_away=set()),
        "agent_identity": "s",
        "activity_attempt": SimpleNamespace(number=try_number),
        "key": str,
        "read": read,
    }
    return Session(cast(Job, SimpleNamespace(**fields)))


async def test_a_session_keeps_the_rollouts_rules() -> None:
    """Its models, its sampling and its caps are the gateway's to keep, so all of them reach it."""
    request = RolloutRequest(
        run_id="r",
        instance="toy/a",
        agent="claude_code",
        model="policy-b",
        models={"small-*": "judge"},
        sampling=Sampling(temperature=0.3),
        caps=Caps(turns=7),
    )
    job = SimpleNamespace(
        request=request,
        attempt=1,
        agent_identity="s",
        key=str,
        mcp_servers={},
        labels=lambda _: {"run": "r"},
        services=SimpleNamespace(gateway=Gateway(is_open=False)),
    )
    spec = await AgentSession(cast(Job, job))._spec()

    for rule in ("model", "models", "sampling", "caps"):
        assert getattr(spec, rule) == getattr(request, rule)
    assert spec.labels["run"] == "r"


async def test_a_first_try_opens_in_one_request() -> None:
    gateway = Gateway(is_open=False)
    await session(gateway, 1).open()
    assert gateway.asked == ["open"]


async def test_a_later_try_takes_the_session_as_it_was_opened() -> None:
    """The spec may differ, because the try may have another worker and another trace."""
    gateway = Gateway(is_open=True, refuses=True)
    await session(gateway, 2).open()
    assert gateway.asked == ["get"]


async def test_a_later_try_opens_what_the_earlier_one_did_not() -> None:
    gateway = Gateway(is_open=False)
    await session(gateway, 2).open()
    assert gateway.asked == ["get", "open"]


async def test_a_reset_workflow_takes_the_session_of_its_earlier_play() -> None:
    """In the first try of a new workflow run, the session is open with another spec."""
    gateway = Gateway(is_open=True, refuses=True)
    await session(gateway, 1).open()
    assert gateway.asked == ["open", "get"]


async def test_a_refused_session_keeps_its_reason() -> None:
    with pytest.raises(ConfigurationError, match="refused"):
        await session(Gateway(is_open=False, refuses=True), 1).open()


@pytest.mark.parametrize("asked", ["look", "close"])
@pytest.mark.parametrize("store_too", [False, True])
async def test_an_agent_that_ends_while_the_gateway_is_away_has_no_verdict(
    asked: str, store_too: bool
) -> None:
    """The gateway may have failed the agent's last call. This holds even if the host lost gateway
    and store together, or if the agent's end finds the gateway unavailable."""
    gateway, store = Gateway(is_open=True), UnsteadyStore()
    mine = session(gateway, 1, store)
    gateway.is_away, store.away = True, store_too
    with pytest.raises(StoreUnavailable if store_too else GatewayUnavailable):
        await getattr(mine, asked)()
    gateway.is_away = store.away = False
    await mine.open(is_started=True)

    assert (await mine.close()).unanswered == "the gateway was unavailable"


async def test_an_agent_that_went_on_with_the_gateway_that_came_back_has_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway(is_open=True)
    mine = session(gateway, 1)
    gateway.is_away = True
    with pytest.raises(GatewayUnavailable):
        await mine.look()
    gateway.is_away = False
    await mine.open(is_started=True)
    monkeypatch.setattr("tests.unit.rollouts.test_sessions.SUMMARY", AFTER_ONE_TURN)

    assert (await mine.close()).unanswered == ""
