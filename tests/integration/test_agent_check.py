"""The agent that docs/extend.md prints passes its printed test and `perdure agents check`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from perdure import variant_registry
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from tests import docs_pages
from tests.checkout_paths import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a reader saves."""
    if missing := BubblewrapProvider(Settings(home=tmp_path / "boxes")).check():
        pytest.skip("; ".join(missing))
    (tmp_path / "my_agents.py").write_text(docs_pages.block("extend.md", "python agent"))
    test = docs_pages.block("extend.md", "python test of the agent")
    (tmp_path / "test_my_agents.py").write_text(test)
    return tmp_path


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder), str(ROOT / "src")))
    env = {**os.environ, "PYTHONPATH": path, "PERDURE_HOME": str(folder / "home")}
    command = [sys.executable, "-m", *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_printed_agent_passes_its_printed_test(folder: Path) -> None:
    """A new agent is one file of at most 60 lines and a test of ten."""
    lines = [
        (folder / name).read_text().count("\n") for name in ("my_agents.py", "test_my_agents.py")
    ]
    # Its own folder: otherwise this `pytest` first removes what earlier runs have left. The path is
    # short, because the stand's socket is below it.
    with tempfile.TemporaryDirectory() as own:
        given = ("-p", "no:cacheprovider", "--basetemp", f"{own}/t")
        done = run(folder, "pytest", "-q", *given, "test_my_agents.py")

    assert lines[0] <= 60
    assert lines[1] <= 10
    assert done.returncode == 0, done.stdout + done.stderr


def test_check_says_what_the_printed_agent_can_do(folder: Path) -> None:
    """It takes an agent of a user's own by its dotted path."""
    done = run(folder, "perdure.cli.main", "agents", "check", "my_agents:OneShot", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {
            "agent": "one_shot",
            "version": "",
            "streaming": "no",
            "tools": "text",
            "sub_agents": "none",
            "resume": "1/1",
            "mcp": "none",
            "trained": "all",
            "problem": "",
        }
    ]


def test_check_fails_for_an_agent_that_does_not_work(folder: Path) -> None:
    """An agent that never runs its model's script gets exit code 1 and the reason."""
    file = folder / "my_agents.py"
    file.write_text(file.read_text().replace('subprocess.run(["bash", "-c", script])', ""))
    done = run(folder, "perdure.cli.main", "agents", "check", "my_agents:OneShot")

    assert done.returncode == 1
    assert "one_shot: the agent ended finished and its patch is unresolved" in done.stderr


def test_check_fails_for_an_agent_that_claims_mcp_servers_but_calls_none(folder: Path) -> None:
    """The column says so too."""
    file = folder / "my_agents.py"
    claim = "class OneShot:\n    uses_mcp_servers: ClassVar[bool] = True"
    file.write_text(file.read_text().replace("class OneShot:", claim))
    done = run(folder, "perdure.cli.main", "agents", "check", "my_agents:OneShot")

    assert done.returncode == 1
    assert done.stdout.endswith("|`one_shot`|no|text|none|1/1|no|all|\n")
    assert "one_shot: it takes MCP servers, but the answer" in done.stderr


def test_the_docs_list_each_agent_that_calls_a_model() -> None:
    """`acp` is as good as the server that it starts."""
    load = variant_registry.load
    agents = {n: load("agent", variant_registry.AGENTS, n) for n in variant_registry.AGENTS}
    calling = {name for name, agent in agents.items() if agent.needs_model}

    assert calling - {"acp"} == set(docs_pages.agent_rows())
