"""`perdure agents pin` with an agent from PyPI, in a copy of the package whose locks may change."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.installation import PACKAGE
from perdure.testing.agent_stand import Stand
from tests.stack.running_stack import TOOLS

pytestmark = pytest.mark.registry


@pytest.fixture
def installation(tmp_path: Path, stand: Stand) -> Path:
    """Another copy of Perdure, with a home that has the checkout's tools."""
    shutil.copytree(PACKAGE, tmp_path / "copy" / "perdure")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "tools").symlink_to(TOOLS)
    return tmp_path


def pin(installation: Path, version: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """What the command printed, and the lock afterwards."""
    copy = installation / "copy"
    told = subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", "agents", "pin", "smolagents", version],
        env={**os.environ, "PYTHONPATH": str(copy), "PERDURE_HOME": str(installation / "home")},
        cwd=installation,
        capture_output=True,
        text=True,
        check=False,
    )
    locks = copy / "perdure" / "agents" / "locks"
    return told, "".join((locks / f"smolagents.{kind}").read_text() for kind in ("in", "txt"))


def test_a_version_that_passes_the_checks_is_locked(installation: Path) -> None:
    """The table of its checks is printed."""
    told, lock = pin(installation, "1.25.0")

    assert told.returncode == 0, told.stderr
    assert told.stdout.endswith("|`smolagents`|no|text|none|4/4|none|all|\n")
    assert "smolagents 1.26.0 -> 1.25.0: smolagents.in, smolagents.txt" in told.stderr
    assert lock.count("smolagents==1.25.0") == 2


def test_a_version_that_fails_its_checks_changes_nothing(installation: Path) -> None:
    """This one lacks an argument that Perdure gives; the agent's own words are printed."""
    told, lock = pin(installation, "1.20.0")

    assert told.returncode == 1
    assert "unexpected keyword argument 'timeout_seconds'" in told.stderr
    assert lock.count("smolagents==1.26.0") == 2
