"""OpenHands' settings, and the Python that it runs on."""

import json
import os
import sys
from pathlib import Path

import pytest

from perdure.agents import tool_cache
from perdure.agents.base import HOME
from perdure.agents.openhands import Openhands
from perdure.errors import MissingDependency
from tests.unit.agents.headless_task import TASK, with_options


def test_its_settings_name_the_gateway_and_the_window() -> None:
    """Our address, the rollout's limits, and a timeout longer than the budget."""
    launch = Openhands().launch(with_options(max_steps=7))
    settings = json.loads(launch.files[f"{HOME}/openhands.json"])
    llm = settings["llm"]

    assert (llm["model"], llm["base_url"]) == ("openai/policy", "http://127.0.0.1:18001/v1")
    assert (llm["max_input_tokens"], llm["max_output_tokens"]) == (50_000, 2000)
    assert llm["timeout"] > TASK.budget_s
    assert settings["max_steps"] == 7


def test_a_named_python_that_is_too_old_is_refused() -> None:
    """The error says how to get one, before the installation starts."""
    with pytest.raises(MissingDependency, match=r"uv python install 99.1.*SOME_PYTHON"):
        tool_cache.find_python("99.1", sys.executable, "SOME_PYTHON")


def test_its_python_is_found_behind_a_shim_of_pyenv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv finds only the shim, which does not start; pyenv's folder has the interpreter."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    script(tmp_path / "shims" / "python9.8", "echo 'pyenv: command not found' >&2; exit 127")
    with pytest.raises(MissingDependency, match=rf"{tmp_path / 'pyenv/versions'}.*SOME_PYTHON"):
        tool_cache.find_python("9.8", "", "SOME_PYTHON")

    behind = tmp_path / "pyenv/versions/9.8.7/bin/python"
    script(
        behind,
        r"case $3 in *'>='*) printf '/opt\nTrue\n9.8.7\n';; *) printf '/opt\n9.8.7\n';; esac",
    )
    assert tool_cache.find_python("9.8", "", "SOME_PYTHON").executable == behind
    assert tool_cache.find_python("9.7", "", "SOME_PYTHON").executable == behind


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_named_python_is_used_as_it_is() -> None:
    """The sandbox must see its base prefix, not a virtual environment's folder."""
    found = tool_cache.find_python("3.11", sys.executable, "SOME_PYTHON")

    assert found.executable == Path(sys.executable)
    assert found.prefix == Path(sys.base_prefix)
