"""`perdure export -f dataset --push`: the hub's own client, and a stand-in of the hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.storage.local_store import LocalStore
from tests import hub_server
from tests.store_with_runs import write_rollout


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    await write_rollout(LocalStore(tmp_path / "store"), resolved=True)
    return tmp_path


def _push(home: Path, url: str, token: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: the client reads its variables when it is imported."""
    ours = {"PERDURE_HOME": str(home), "PERDURE_STORE": str(home / "store"), "HF_HOME": str(home)}
    hub = {"HF_ENDPOINT": url, "HF_TOKEN": token}
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    command = ["export", "made", "-f", "dataset", "-o", str(home / "out"), "--push", "o/runs"]
    return subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", *command],
        check=False,
        env={**kept, **ours, **hub},
        capture_output=True,
        text=True,
        timeout=300,
    )


async def test_a_run_is_pushed_as_a_private_dataset(home: Path) -> None:
    """Every file of the folder is there, as it was written; a second push is a second commit."""
    with hub_server.serving() as hub:
        first, second = (_push(home, hub.url, hub_server.TOKEN) for _ in range(2))

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert f"pushed to {hub.url}/datasets/o/runs" in first.stderr
    assert hub.repositories["o/runs"]["type"] == "dataset"
    assert hub.repositories["o/runs"]["visibility"] == "private"
    out = home / "out"
    written = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert hub.files["o/runs"] == written
    assert {"README.md", "data/rollouts.jsonl", "data/sft.jsonl"} <= set(written)


async def test_a_refused_push_is_one_line(home: Path) -> None:
    """The hub's own sentence, and what to do; the folder stays."""
    with hub_server.serving() as hub:
        done = _push(home, hub.url, "hf_wrong")

    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode in (1, 2)
    assert len(errors) == 1, done.stderr
    assert "Invalid username or password." in errors[0]
    assert "HF_TOKEN" in errors[0]
    assert (home / "out" / "README.md").exists()


async def test_a_hub_that_is_away_is_one_line(home: Path) -> None:
    """At once, without the client's retries."""
    done = _push(home, "http://127.0.0.1:9", "hf_any")

    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert (
        "not pushed to o/runs: the Hugging Face hub at 127.0.0.1:9 cannot be reached" in errors[0]
    )
