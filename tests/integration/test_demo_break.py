"""`perdure demo --break` as a newcomer runs it: real agents, real kills, a real proxy."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.runs.interruptions import Interruptions
from perdure.cli.runs.run_results import episodes_and_interruptions
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle
from perdure.storage.store_url import open_store
from tests.checkout_paths import ROOT
from tests.stack.running_stack import TOOLS

pytestmark = [
    *(pytest.mark.temporal, pytest.mark.registry, pytest.mark.longer),
    pytest.mark.timeout(1200),  # a quiet host needs three minutes
]

KILLED = {f"kill -9 {part}" for part in ("sandbox", "worker", "gateway", "engine", "Temporal")}
REFUSED = {"401 for 5 s", "504 for 5 s"}
FULL = {"disk full for 5 s"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    if missing := BubblewrapProvider(Settings(home=home)).check():
        pytest.skip("; ".join(missing))
    home.mkdir()
    TOOLS.mkdir(parents=True, exist_ok=True)
    (home / "tools").symlink_to(TOOLS)
    yield home
    stack_lifecycle.shut_down(Settings(home=home), print)


def demo_break(home: Path) -> "subprocess.CompletedProcess[str]":
    ours = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", "demo", "--break", "--json"],
        env={**clean, "PERDURE_HOME": str(home)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_part_breaks_and_every_rollout_is_graded_right(home: Path) -> None:
    """Each fault strikes agents at work. Only calls in flight at the kills are bought twice, and nothing
    stays on the host. The user's store has the episodes, with what interrupted them."""
    done = demo_break(home)

    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    played = {fault["fault"] for fault in told["faults"]}
    assert played - FULL == KILLED | REFUSED
    assert played >= FULL or "Skipped: a full file system" in done.stderr
    assert (told["graded_right"], told["rollouts"]) == (6, 6)
    assert told["wrong_zeros_without_recovery"] == 4
    assert [line.partition(" at ")[2] for line in told["continued"]] == ["turn 3"]
    assert 0 < told["bought_twice"] <= told["in_flight_at_kills"]
    assert told["left_behind"] == told["problems"] == []
    _, interrupted = asyncio.run(
        episodes_and_interruptions(open_store(Settings(home=home)), told["run_id"])
    )
    assert interrupted == Interruptions(watched_again=6, continued=1)
