"""A builder's temporary folders are removed at its end, or by the next builder after kill -9."""

import subprocess
import sys
from pathlib import Path

import pytest

from perdure.instances.scratch_folders import scratch

KILLED = (
    "import os, signal\n"
    "from perdure.instances.scratch_folders import scratch\n"
    "with scratch('pair') as folder:\n"
    "    (folder / 'before').mkdir()\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    return tmp_path


def names(home: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (home / "scratch").iterdir())


def test_what_a_killed_builder_left_goes_with_the_next(home: Path) -> None:
    """The next builder removes them, and leaves those of live builders."""
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    left = names(home)
    with scratch("commit") as other, scratch("pair") as folder:
        during = names(home)
        (folder / "file").write_text("x")
        assert other.is_dir()

    assert left == [".lock", "pair", "pair"]
    assert during == [".lock", "commit", "commit", "pair", "pair"]
    assert names(home) == [".lock"]
