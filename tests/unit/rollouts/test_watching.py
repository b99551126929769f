"""The watch of the agent stage: which agents it stops before they end by themselves."""

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.engines.base import Wait
from perdure.errors import SandboxLost, TokenizerChanged
from perdure.gateway.base import HOPELESS, SessionSummary
from perdure.rollouts import agent_stage, handler_hooks
from perdure.sandboxes.base import ExecState, ExecStatus

BUDGET_S = 1800.0


class Sandbox:
    """A sandbox whose agent ends by a signal, or by itself after some polls."""

    identity = "box"

    def __init__(self, looks: int) -> None:
        self.looks, self.signals, self.limits = looks, list[int](), list[float]()

    async def wait(self, _: str, seconds: float) -> ExecStatus:
        self.looks -= 1
        if self.signals:
            return ExecStatus(ExecState.KILLED)
        return ExecStatus(ExecState.RUNNING if self.looks else ExecState.EXITED, 0)

    async def extend(self, _: str, seconds: float) -> None:
        self.limits.append(seconds)

    async def signal(self, _: str, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        ({"refused": "401", "refusals": HOPELESS}, True),
        ({"refused": "401", "refusals": HOPELESS - 1}, False),
        ({"refused": "401", "refusals": HOPELESS, "turns": 1}, False),
        ({"too_stale": "old"}, True),
        ({"tokenizer_changed": "other ids", "turns": 3}, True),
        ({"capped": "it has used 3 of 3 turns", "turns": 3}, True),
    ],
)
async def test_an_agent_without_hope_of_an_answer_is_ended(
    told: dict[str, Any], ended: bool
) -> None:
    """The agent would retry for minutes. An answer, or too few refusals, keeps it alive."""
    sandbox = Sandbox(looks=3)
    await _watch(sandbox, told, told, told)

    assert sandbox.signals == ([signal.SIGKILL] if ended else [])


async def test_a_wait_for_an_engine_is_not_the_agents_time() -> None:
    """The limit moves by the time waited, also during a wait, and stays after that."""
    sandbox = Sandbox(looks=5)
    now = Wait(since=0.0, reason="full")
    waits, over = {"waiting_seconds": 7.0, "waits": now}, {"waiting_seconds": 12.0}
    await _watch(sandbox, {}, waits, over, over)

    assert sandbox.limits == [BUDGET_S + 7 + 2 * agent_stage.WATCH_S, BUDGET_S + 12]


async def test_the_watch_of_a_stopped_agent_ends_while_it_runs() -> None:
    """The stage then ends the agent and keeps its work, as after a cancellation."""
    sandbox = Sandbox(looks=5)
    status = await _watch(sandbox, {}, {"stopped": True})

    assert (status.done, sandbox.signals) == (False, [])


async def test_a_handlers_agent_that_fails_at_a_refused_call_gets_no_new_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its code failed because no engine reads the session's ids any more, which another sandbox does not
    change."""
    told = SessionSummary(session_id="s", open=True, turns=3, tokenizer_changed="other ids")

    async def summary() -> SessionSummary:
        return told

    async def failed(*_: Any) -> None:
        raise SandboxLost("the handler failed: 410")

    async def alive(*_: Any) -> None:
        """Renews nothing."""

    monkeypatch.setattr(handler_hooks, "run", failed)
    monkeypatch.setattr(agent_stage, "_keep_alive", alive)
    session = SimpleNamespace(look=summary, close=summary)
    job = SimpleNamespace(agent_budget_s=BUDGET_S)
    with pytest.raises(TokenizerChanged, match="other ids"):
        await agent_stage._run_by_handler(*cast(Any, (job, session, None)))


async def _watch(sandbox: Sandbox, *told: dict[str, Any]) -> ExecStatus:
    """A session that reports these summaries, one per poll of the agent stage."""
    summaries = iter(told)

    async def look() -> SessionSummary:
        return SessionSummary(session_id="s", open=True, **next(summaries))

    job = SimpleNamespace(
        agent_budget_s=BUDGET_S,
        request=SimpleNamespace(),
        services=SimpleNamespace(
            settings=SimpleNamespace(sandbox=SimpleNamespace(ttl_s=3600)),
            seats=SimpleNamespace(take=lambda _: None),
        ),
        activity_attempt=SimpleNamespace(report=lambda **_: None),
    )
    route = SimpleNamespace(check=lambda: None)
    session = SimpleNamespace(look=look)
    return await agent_stage._watch(*cast(Any, (job, session, sandbox, route)))
