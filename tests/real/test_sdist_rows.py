"""The seven real SWE-bench rows through the command line, three times each: verdicts never waver.

Needs the task data beside the checkout, bubblewrap and a package registry; run by `make test-real`.
The home is kept in .perdure/test-real, so the seven environments are built once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_run
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Outcome, RolloutStatus, TestStatus

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT.parent / "shared/data/tasks/swebench_sdist.jsonl"
HOME = ROOT / ".perdure/test-real"
SAMPLES = 3
FOREIGN = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")

pytestmark = [
    pytest.mark.registry,
    pytest.mark.skipif(not ROWS.exists(), reason=f"the task data is not here: {ROWS.name}"),
]


def perdure(*arguments: str) -> str:
    """One command as a user types it; its standard output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", *arguments],
        env={**env, "PERDURE_HOME": str(HOME)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def stack() -> Iterator[None]:
    if missing := BubblewrapProvider(Settings(home=HOME)).check():
        pytest.skip("; ".join(missing))
    perdure("up")
    yield
    perdure("down")


def run(agent: str) -> dict[str, Any]:
    """A new run of all rows; what `--json` printed."""
    asked = ("run", str(ROWS), "--agent", agent, "-n", str(SAMPLES), "--new", "--wait", "--json")
    document: dict[str, Any] = json.loads(perdure(*asked))
    return document


def per_test(episode: Episode) -> dict[str, TestStatus]:
    assert episode.grade is not None
    return {**episode.grade.fail_to_pass, **episode.grade.pass_to_pass}


@pytest.mark.parametrize(
    ("agent", "outcome"), [("oracle", Outcome.RESOLVED), ("nop", Outcome.UNRESOLVED)]
)
async def test_verdicts_are_the_same_every_time(agent: str, outcome: Outcome) -> None:
    """Gold resolves each row, nothing resolves none, neither breaks a test, each run test by test."""
    document = run(agent)
    episodes = await read_run(LocalStore(HOME / "store"), document["run_id"])
    by_instance: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_instance.setdefault(episode.instance_id, []).append(episode)

    rows = [json.loads(line)["instance_id"] for line in ROWS.read_text().splitlines()]
    assert {name: len(found) for name, found in by_instance.items()} == dict.fromkeys(rows, SAMPLES)
    assert {(e.status, e.outcome) for e in episodes} == {(RolloutStatus.GRADED, outcome)}
    assert {e.rewards.p2p_fraction for e in episodes if e.rewards} == {1.0}
    for name, (first, *others) in by_instance.items():
        assert all(per_test(other) == per_test(first) for other in others), name
