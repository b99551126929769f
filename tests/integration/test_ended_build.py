"""`perdure instances build` that is ended while it works leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.instances import host_git
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from tests.stack.host_requirements import why_not_here
from tests.stack.wait_until import until

RECIPE = '[[history]]\nrepository = "thing"\nrequires = []\n'
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "stuck"\nbackend-path = ["."]\n'
BACKEND = "import signal\n\n\ndef build_editable(*_):\n    signal.pause()\n"


def recipe(folder: Path) -> Path:
    """One row, whose install never ends."""
    clone = folder / "thing"
    clone.mkdir(parents=True)
    (folder / "dataset.toml").write_text(f'name = "stuck"\n{RECIPE}')
    host_git.start(clone)
    (clone / "pyproject.toml").write_text(f'{PROJECT}[project]\nname = "thing"\nversion = "1"\n')
    (clone / "stuck.py").write_text(
        f"{BACKEND}\n\nget_requires_for_build_editable = build_editable\n"
    )
    for number in (1, 2):
        (clone / "thing.py").write_text(f"X = {number}\n")
        (clone / "test_thing.py").write_text(f"def test_x():\n    assert {number}\n")
        host_git.add_commit(clone, f"x is {number}\n")
    return folder


@pytest.mark.longer
@pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())
@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.longer)]
)
async def test_a_build_that_is_ended_ends_its_sandboxes(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """SIGTERM or Ctrl-C in the middle of an install: its sandbox and its folder go before it does."""
    home = tmp_path / "home"
    provider = BubblewrapProvider(Settings(home=home))

    async def alive() -> list[str]:
        return [box.identity for box in await provider.list() if box.alive]

    build = subprocess.Popen(
        [sys.executable, "-m", "perdure.cli.main", "instances", "build", str(recipe(tmp_path))],
        env={**os.environ, "PERDURE_HOME": str(home)},
        stderr=subprocess.PIPE,
    )
    try:
        await until(alive, "the install runs in a sandbox")
        build.send_signal(signum)
        _, told = await asyncio.to_thread(build.communicate)
    finally:
        build.kill()

    assert await alive() == []
    assert list((home / "environments" / "building").iterdir()) == []
    assert build.returncode == 128 + signum, told.decode()
    assert b"Traceback" not in told
