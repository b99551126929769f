"""How a stage opens the session of its agent: in one request, unless an earlier try may have done so."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.errors import ConfigurationError, NotFound
from perdure.gateway.base import SessionSpec, SessionSummary
from perdure.rollouts.gateway_session.session import AgentSession
from perdure.rollouts.job import Job

SUMMARY = SessionSummary(session_id="s", open=True)


class Gateway:
    """Knows at most one session; each request to it is in `asked`."""

    def __init__(self, *, is_open: bool, refuses: bool = False) -> None:
        self.is_open, self.refuses = is_open, refuses
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


class Session(AgentSession):
    async def _spec(self) -> SessionSpec:
        return SessionSpec(session_id="s", turns_key="t")


def session(gateway: Gateway, try_number: int) -> Session:
    async def read(name: str, model: object) -> None:
        return None

    fields: dict[str, Any] = {
        "services": SimpleNamespace(gateway=gateway),
        "agent_identity": "s",
        "this_try": SimpleNamespace(number=try_number),
        "read": read,
    }
    return Session(cast(Job, SimpleNamespace(**fields)))


async def test_a_first_try_opens_in_one_request() -> None:
    gateway = Gateway(is_open=False)
    await session(gateway, 1).open()
    assert gateway.asked == ["open"]


async def test_a_later_try_takes_the_session_as_it_was_opened() -> None:
    """Its spec may differ: another worker, another trace."""
    gateway = Gateway(is_open=True, refuses=True)
    await session(gateway, 2).open()
    assert gateway.asked == ["get"]


async def test_a_later_try_opens_what_the_earlier_one_did_not() -> None:
    gateway = Gateway(is_open=False)
    await session(gateway, 2).open()
    assert gateway.asked == ["get", "open"]


async def test_a_reset_workflow_takes_the_session_of_its_earlier_play() -> None:
    """The first try of a new play: the session is open with another spec."""
    gateway = Gateway(is_open=True, refuses=True)
    await session(gateway, 1).open()
    assert gateway.asked == ["open", "get"]


async def test_a_refused_session_keeps_its_reason() -> None:
    with pytest.raises(ConfigurationError, match="refused"):
        await session(Gateway(is_open=False, refuses=True), 1).open()
