"""The file that Harbor's rewardkit from PyPI writes, read as a grading reads it."""

import os
import subprocess
from pathlib import Path

import pytest

from perdure.agents import tool_cache
from perdure.graders.named_rewards import main_reward
from perdure.graders.protocols.reward_file import parse_reward_file
from perdure.python_interpreters import find_interpreter, find_uv

pytestmark = pytest.mark.registry

REWARDKIT = "harbor-rewardkit==0.2.3"
PYTHON = "3.12"
"""The oldest that it takes."""
RIGHT = """
import rewardkit as rk
rk.file_exists("a.txt")
rk.file_contains("a.txt", "moon")
"""
SHORT = """
import rewardkit as rk
@rk.criterion
def is_short(workspace):
    return len((workspace / "a.txt").read_text()) / 48
"""


def _installed(folder: Path) -> Path:
    uv = str(find_uv())
    if (found := find_interpreter(PYTHON)) is None:
        pytest.skip(f"no Python {PYTHON}")
    tool_cache.run_installer([uv, "venv", "-q", "--python", str(found.program), str(folder)])
    own = str(folder / "bin" / "python")
    tool_cache.run_installer([uv, "pip", "install", "-q", "--python", own, REWARDKIT])
    return folder / "bin" / "rewardkit"


@pytest.mark.longer
def test_its_rewards_are_the_grades(tmp_path: Path) -> None:
    """Each folder of criteria is one reward, and their mean decides."""
    for name, text in (("right/check.py", RIGHT), ("short/check.py", SHORT)):
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.txt").write_text("hello world\n")
    written = tmp_path / "reward.json"
    command = [str(_installed(tmp_path / "venv")), "--workspace", str(tmp_path / "app")]
    command += ["--output", str(written), str(tmp_path / "tests")]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would ask another server
    subprocess.run(command, check=True, env=env, capture_output=True, timeout=300)
    found = parse_reward_file(written.read_bytes())

    assert (found.rewards, found.problem) == ({"right": 0.5, "short": 0.25}, "")
    assert main_reward(found.rewards) == 0.375
