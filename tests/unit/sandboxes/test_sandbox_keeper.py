"""When a keeper reports the end of a command."""

import signal
from types import SimpleNamespace

import pytest

from perdure.sandboxes.host.keeper.sandbox_keeper import Keeper, _Command


@pytest.mark.parametrize(
    ("signum", "reported"),
    [(signal.SIGTERM, []), (signal.SIGKILL, []), (signal.SIGINT, ["signal 2 oom=0"])],
)
def test_a_signal_that_ends_whole_jobs_is_not_the_commands_end_at_once(
    signum: int, reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and systemd send SIGTERM to the agent and its keeper. The agent, if it dies first, must not
    count as crashed: the keeper waits for its own signal, and then leaves no result."""
    told: list[str] = []
    keeper = Keeper.__new__(Keeper)
    keeper._outputs = SimpleNamespace(drain=lambda streams: None)  # type: ignore[assignment]
    keeper._deadlines, keeper._undecided, keeper._ooms, keeper._holder = [], [], -1, 1
    monkeypatch.setattr(keeper, "_report", lambda command, how: told.append(how))
    command = _Command("agent", 0, None, 0)
    command.status = signum
    keeper._end(command)

    assert told == reported
