"""Watchers in one process share a request to the gateway."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from perdure.errors import GatewayUnavailable, NotFound
from perdure.gateway import status_batching
from perdure.gateway.base import SessionSummary
from perdure.gateway.status_batching import SummaryBatcher
from perdure.testing.local_gateway import LocalGateway


class Gateway:
    """Knows sessions by their names; `away` makes it fail."""

    def __init__(self, *known: str) -> None:
        self.known = known
        self.asked: list[list[str]] = []
        self.away = False

    async def summaries(self, session_ids: Sequence[str]) -> Mapping[str, SessionSummary]:
        self.asked.append(list(session_ids))
        if self.away:
            raise GatewayUnavailable("away")
        found = [name for name in session_ids if name in self.known]
        return {name: SessionSummary(session_id=name, open=True) for name in found}


async def test_concurrent_lookups_are_one_request() -> None:
    """Two watchers of a session share its answer, and the next lookup makes a new request."""
    gateway = Gateway("a", "b")
    looks = SummaryBatcher(gateway.summaries, gather_s=0.0)
    first = await asyncio.gather(looks.look("a"), looks.look("b"), looks.look("a"))
    await looks.look("b")

    assert [one.session_id for one in first] == ["a", "b", "a"]
    assert gateway.asked == [["a", "b"], ["b"]]


async def test_a_large_process_sends_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_batching, "MOST", 2)
    gateway = Gateway("a", "b", "c")
    looks = SummaryBatcher(gateway.summaries, gather_s=0.0)
    await asyncio.gather(*map(looks.look, gateway.known))

    assert gateway.asked == [["a", "b"], ["c"]]


async def test_a_missing_session_fails_only_its_own_watcher() -> None:
    looks = SummaryBatcher(Gateway("a").summaries, gather_s=0.0)
    known, absent = await asyncio.gather(
        looks.look("a"), looks.look("gone"), return_exceptions=True
    )

    assert isinstance(known, SessionSummary)
    assert isinstance(absent, NotFound)


async def test_an_unreachable_gateway_fails_all_watchers_and_is_called_again() -> None:
    gateway = Gateway("a", "b")
    gateway.away = True
    looks = SummaryBatcher(gateway.summaries, gather_s=0.0)
    failed = await asyncio.gather(looks.look("a"), looks.look("b"), return_exceptions=True)
    gateway.away = False

    assert [type(one) for one in failed] == [GatewayUnavailable, GatewayUnavailable]
    assert (await looks.look("a")).open


async def test_a_cancelled_watcher_disturbs_no_other() -> None:
    looks = SummaryBatcher(Gateway("a").summaries, gather_s=0.0)
    leaving, staying = (asyncio.create_task(looks.look("a")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()

    assert (await staying).session_id == "a"


async def test_a_gateway_returns_many_sessions_at_once(tmp_path: Path) -> None:
    """Unknown sessions are left out."""
    async with LocalGateway(tmp_path) as gateway:
        for name in ("a", "b"):
            await gateway.open(name)
        found = await asyncio.gather(
            *map(gateway.control.look, ("a", "b", "gone", "../x")), return_exceptions=True
        )

    assert [getattr(one, "session_id", type(one)) for one in found] == [
        "a",
        "b",
        NotFound,
        NotFound,
    ]
