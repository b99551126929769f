"""`perdure watch` ends as `perdure run` does."""

from types import SimpleNamespace
from typing import Any

import pytest

from perdure.cli import temporal_connection
from perdure.cli.main import invoke
from perdure.cli.runs import run_launcher
from perdure.types import EpisodeRef, RolloutStatus


@pytest.mark.parametrize(
    ("status", "stopped", "code"),
    [
        (RolloutStatus.GRADED, "", 0),
        (RolloutStatus.GRADED, "Stopped by its budget", 1),
        (RolloutStatus.FAILED, "", 1),
    ],
)
def test_the_exit_code_tells_of_rollouts_without_a_verdict(
    status: RolloutStatus, stopped: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that failed, and of those that the budget left."""
    episode = EpisodeRef(uri="x", instance_id="a", sample_index=0, agent="nop", status=status)

    async def run(run_id: str) -> Any:
        return SimpleNamespace(run_id=run_id)

    async def connect(_: Any) -> Any:
        return SimpleNamespace(perdure=SimpleNamespace(run=run))

    async def to_the_end(*_: Any, **__: Any) -> run_launcher.RunEnd:
        return run_launcher.RunEnd([episode], stopped)

    monkeypatch.setattr(temporal_connection, "connect", connect)
    monkeypatch.setattr(run_launcher, "follow_run", to_the_end)

    assert invoke(["watch", "r", "--json"]) == code
