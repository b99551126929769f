"""`perdure swebench` on a real stack that it starts, with mini-swe-agent and an engine that
HOSTED_VLLM_API_BASE names."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.settings.settings_tree import Settings
from perdure.storage.store_url import open_store
from perdure.testing.scripted_engine import ScriptedEngine
from tests.checkout_paths import ROOT
from tests.stack.gated_engine import FIX
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import add_instances
from tests.stack.running_stack import TOOLS

pytestmark = pytest.mark.temporal

SCRIPT = {
    "default": {
        "turns": [
            {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
            for command in (FIX, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        ]
    }
}


@pytest.mark.longer
async def test_mini_extras_line_leaves_mini_extras_files(tmp_path: Path) -> None:
    """The run is sampled with exact tokens and graded. preds.json and each trajectory have the patch.
    The same line joins the run and writes them again. Its folder is closed to another run."""
    if missing := why_not_here():
        pytest.skip(missing)
    home, out = tmp_path / "h", tmp_path / "out"
    home.mkdir()
    TOOLS.mkdir(parents=True, exist_ok=True)
    (home / "tools").symlink_to(TOOLS)
    await add_instances(home, open_store(Settings(home=home)))

    async with ScriptedEngine(SCRIPT) as engine:
        foreign = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        own = {
            "PERDURE_HOME": str(home),
            "PERDURE_METRICS__PORT": "0",
            "HOSTED_VLLM_API_BASE": f"{engine.url}/v1",
        }

        async def perdure(*words: str) -> "subprocess.CompletedProcess[str]":
            return await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "perdure.cli.main", *words],
                env=kept | own,
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )

        line: tuple[str, ...] = (
            "swebench",
            "--subset",
            "tests",
            "--filter",
            "add$|add-wrongly",
            "--workers",
            "2",
        )
        line += ("--model", "hosted_vllm/policy", "--output", str(out))
        try:
            done = await perdure(*line)
            (out / "preds.json").unlink()
            again = await perdure(*line, "--json")
            other = await perdure(*line, "--set", "sampling.temperature=0.5")
        finally:
            await perdure("down")

    assert done.returncode == 0, done.stderr
    assert "2 predictions and 2 trajectory files" in done.stderr
    assert (again.returncode, other.returncode) == (0, 2), again.stderr
    assert "its preds.json is of another run" in other.stderr
    rollouts = json.loads(again.stdout)["rollouts"]
    assert {r["instance_id"]: r["outcome"] for r in rollouts} == {
        "add": "resolved",
        "add-wrongly": "unresolved",
    }
    predictions = json.loads((out / "preds.json").read_text())
    assert sorted(predictions) == ["add", "add-wrongly"]
    for name, entry in predictions.items():
        trajectory = json.loads((out / name / f"{name}.traj.json").read_text())
        assert "+    return a + b" in entry["model_patch"]
        assert trajectory["info"]["submission"] == entry["model_patch"]
        assert trajectory["info"]["exit_status"] == "Submitted"
