"""The agent stage's watch: which agents it ends before they end themselves."""

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.gateway.base import HOPELESS, SessionSummary
from perdure.rollouts import agent
from perdure.sandboxes.base import ExecState, ExecStatus


class Sandbox:
    """One whose agent ends by a signal, or by itself after some looks."""

    identity = "box"

    def __init__(self, looks: int) -> None:
        self.looks, self.signals = looks, list[int]()

    async def wait(self, _: str, seconds: float) -> ExecStatus:
        self.looks -= 1
        if self.signals:
            return ExecStatus(ExecState.KILLED)
        return ExecStatus(ExecState.RUNNING if self.looks else ExecState.EXITED, 0)

    async def signal(self, _: str, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        ({"refused": "401", "refusals": HOPELESS}, True),
        ({"refused": "401", "refusals": HOPELESS - 1}, False),
        ({"refused": "401", "refusals": HOPELESS, "turns": 1}, False),
        ({"too_stale": "old"}, True),
    ],
)
async def test_an_agent_without_hope_of_an_answer_is_ended(
    told: dict[str, Any], ended: bool
) -> None:
    """It would ask for minutes. One refused side request, or an answer, keeps it alive."""
    sandbox = Sandbox(looks=3)

    async def look() -> SessionSummary:
        return SessionSummary(session_id="s", open=True, **told)

    job = SimpleNamespace(
        services=SimpleNamespace(
            settings=SimpleNamespace(sandbox=SimpleNamespace(ttl_s=3600)),
            seats=SimpleNamespace(take=lambda _: None),
        ),
        this_try=SimpleNamespace(report=lambda **_: None),
    )
    route = SimpleNamespace(check=lambda: None)
    session = SimpleNamespace(look=look)
    await agent._watch(*cast(Any, (job, session, sandbox, route)))

    assert sandbox.signals == ([signal.SIGKILL] if ended else [])
