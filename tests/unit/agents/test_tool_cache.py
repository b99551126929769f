"""The tool cache builds each tool once and completely, for many callers and after kills."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.agents import tool_cache
from perdure.durable_files import MANIFEST
from perdure.errors import AgentError


async def test_many_callers_build_once(tmp_path: Path) -> None:
    """Concurrent callers share one build and get the same folder."""
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        folder.mkdir()

    folders = await asyncio.gather(
        *(tool_cache.built(tmp_path, "tool", "recipe", build) for _ in range(8))
    )

    assert len(builds) == 1
    assert len(set(folders)) == 1


ASK = """
import asyncio, sys
from pathlib import Path
from perdure.agents import tool_cache

def build(folder):
    folder.mkdir()
    with open(sys.argv[1] + "/builds", "a") as log:
        log.write("x")

asyncio.run(tool_cache.built(Path(sys.argv[1]), "tool", "recipe", build))
"""


def test_many_processes_build_once(tmp_path: Path) -> None:
    """Worker processes of one host share one build."""
    workers = [subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path)]) for _ in range(3)]

    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


async def test_failed_build_leaves_nothing_to_find(tmp_path: Path) -> None:
    """A build that dies halfway leaves no tool; the next caller builds again."""

    def dies(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise AgentError("registry away")

    with pytest.raises(AgentError):
        await tool_cache.built(tmp_path, "tool", "recipe", dies)
    folder = await tool_cache.built(tmp_path, "tool", "recipe", Path.mkdir)

    assert [path.name for path in folder.iterdir()] == [MANIFEST]


async def test_another_recipe_is_another_tool(tmp_path: Path) -> None:
    """A changed recipe never changes a folder that running sandboxes have mounted."""
    first = await tool_cache.built(tmp_path, "tool", "1", Path.mkdir)
    second = await tool_cache.built(tmp_path, "tool", "2", Path.mkdir)

    assert first != second
