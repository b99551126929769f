"""A part of a stack that stands still without ending: the supervisor starts it again."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.settings.settings_tree import Settings
from perdure.stack import stack_state
from perdure.stack.stack_state import ChildState, StackState
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    """A stack that `perdure up` started."""
    with tempfile.TemporaryDirectory(prefix="hp-") as folder:
        home = Path(folder) / "h"
        foreign = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        env |= {"PERDURE_HOME": str(home), "PERDURE_METRICS__PORT": "0"}
        command = [sys.executable, "-m", "perdure.cli.main"]
        subprocess.run([*command, "up"], env=env, check=True)
        yield Settings(home=home, metrics={"port": 0})
        subprocess.run([*command, "down"], env=env, check=True)


@pytest.mark.parametrize("name", ["worker", "gateway"])
async def test_a_frozen_part_is_started_again(settings: Settings, name: str) -> None:
    """SIGSTOP for good: after some minutes the part has another process, and the rest the same."""
    before = _state(settings)
    os.kill(before.children[name].pid, signal.SIGSTOP)

    def restarted() -> ChildState | None:
        part = _state(settings).children[name]
        return part if part.restarts > before.children[name].restarts else None

    after = await until(restarted, f"another {name} runs")
    others = {part: child.pid for part, child in before.children.items() if part != name}

    assert after.last_exit == "killed by SIGKILL"
    assert {part: _state(settings).children[part].pid for part in others} == others


def _state(settings: Settings) -> StackState:
    state = stack_state.read(settings)
    assert state is not None
    return state
