"""`perdure report`: what it prints of a run in the store, and where it says more is to be seen."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from perdure.cli.main import invoke
from perdure.storage.local_store import LocalStore
from tests.store_with_runs import write_rollout

FAILED = "Failed: http://ui.example/namespaces/default/workflows?query="
VIEWER = "Viewer: http://viewer.example/runs/made"


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolved rollout and one that was lost."""
    for name in os.environ:
        if name.startswith(("PERDURE_", "TEMPORAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    async def write() -> None:
        store = LocalStore(tmp_path / "home/store")
        await write_rollout(store, resolved=True)
        await write_rollout(store, sample=1, failure="the sandbox is gone")

    asyncio.run(write())


def test_a_report_tells_rates_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout without a verdict is not counted as unresolved; no link leads to what nobody serves."""
    code = invoke(("report", "made"))
    printed = capsys.readouterr()

    assert code == 0, printed.err
    assert "the sandbox is gone" in printed.out
    assert "Failed:" not in printed.err
    assert "Viewer:" not in printed.err


def test_a_report_links_to_what_failed_and_to_the_viewer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a connection: the addresses come from settings."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:9")
    monkeypatch.setenv("PERDURE_TEMPORAL__UI_URL", "http://ui.example")
    monkeypatch.setenv("PERDURE_TEMPORAL__VIEWER_URL", "http://viewer.example")
    invoke(("report", "made"))
    lines = capsys.readouterr().err.splitlines()

    assert [line for line in lines if line.startswith(FAILED)]
    assert VIEWER in lines


def test_a_report_as_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """A lost rollout takes no part in the mean."""
    invoke(("report", "made", "--json"))
    document = json.loads(capsys.readouterr().out)

    (made,) = document["runs"]
    assert (made["rollouts"], made["graded"], made["mean_reward"]) == (2, 1, 1.0)


def test_an_unknown_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code = invoke(("report", "mad"))
    lines = capsys.readouterr().err.splitlines()

    assert (code, len(lines)) == (1, 1)
    assert "'mad'" in lines[0]
