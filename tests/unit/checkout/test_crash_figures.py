"""Which turns the crash benchmark counts as in flight, and which calls as bought."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.call_log import DELIVERY_S, CallLog, EndpointCall, KillWindow
from benchmarks.crash.crash_outcome import Kill

AT = KillWindow(100.0, 100.1)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[CallLog]:
    made = CallLog(tmp_path / "ledger.tsv")
    yield made
    made.close()


def _call(session: str, began: float, ended: float) -> EndpointCall:
    return EndpointCall(session, began, ended)


def test_a_call_of_a_killed_engine_is_bought_and_over(ledger: CallLog) -> None:
    """Its line was written before its answer, and the kill ends it for every later kill."""
    ledger.begin("a")
    open_call = ledger.calls()[0]
    ledger.cut()
    (call,) = ledger.calls()

    assert open_call.ended == float("inf")
    assert call.ended <= time.monotonic()


def test_an_end_without_a_beginning_is_another_jobs(ledger: CallLog) -> None:
    """A call that still ran when the counts were reset is not counted for the next side."""
    name = ledger.begin("a")
    ledger.clear()
    ledger.end(name)

    assert ledger.calls() == []


def test_an_agent_has_at_most_one_turn_in_flight() -> None:
    """An answer on its way and the next call of the same agent count once."""
    calls = [_call("a", 99.0, 99.95), _call("a", 100.05, 101.0), _call("b", 99.0, 101.0)]

    assert Kill("everything", AT).in_flight(calls, agents=8) == 2


def test_a_turn_that_ended_before_the_kill_or_began_after_it_was_not_in_flight() -> None:
    """Only the time of delivery is added to a call."""
    calls = [_call("a", 98.0, 99.9 - DELIVERY_S), _call("b", 100.2, 101.0)]

    assert Kill("everything", AT).in_flight(calls, agents=8) == 0


def test_a_killed_sandbox_strikes_its_own_turn_only() -> None:
    """Turns of other sandboxes go on, so they may not be bought again."""
    calls = [_call("a", 99.0, 101.0), _call("b", 99.0, 101.0)]

    assert Kill("1 sandbox", AT, sessions=("a",)).in_flight(calls, agents=8) == 1


def test_callers_without_a_session_count_as_agents() -> None:
    """Peers name no session: at most one turn of each agent that runs at once."""
    calls = [_call("", 99.0, 101.0) for _ in range(12)]

    assert Kill("everything", AT).in_flight(calls, agents=8) == 8
