"""A task's skills are copied to where its agent looks for them, and refused for agents without skills."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from perdure.agents import skills
from perdure.agents.aider import Aider
from perdure.agents.base import AgentTask, Launch
from perdure.agents.claude_code import ClaudeCode
from perdure.agents.nop import Nop
from perdure.errors import ConfigurationError
from tests.unit.agents.headless_task import TASK


class Lister(Nop):
    """Lists its skills, with an argument that a shell must not touch."""

    skills_folder: ClassVar[str] = ""

    def launch(self, task: AgentTask) -> Launch:
        return Launch(
            argv=("sh", "-c", 'cd "$1" && echo * "$2"', "sh", self.skills_folder, "$HOME *")
        )


def started(agent: Lister, skills_dir: Path, into: Path) -> subprocess.CompletedProcess[str]:
    agent.skills_folder = str(into)  # type: ignore[misc]
    instance = TASK.instance.model_copy(update={"skills_dir": str(skills_dir)})
    argv = skills.launch(agent, replace(TASK, instance=instance)).argv
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)


def test_skills_are_copied_before_the_agent_starts(tmp_path: Path) -> None:
    (tmp_path / "its skills/adding").mkdir(parents=True)

    done = started(Lister(), tmp_path / "its skills", tmp_path / "home/own skills")

    assert done.stdout == "adding $HOME *\n"


def test_an_agent_starts_without_skills_if_the_image_has_none(tmp_path: Path) -> None:
    """As in Harbor. Its standard error says so."""
    done = started(Lister(), tmp_path / "absent", tmp_path / "home")

    assert done.stdout == "* $HOME *\n"
    assert str(tmp_path / "absent") in done.stderr


def test_only_a_task_with_skills_changes_the_launch() -> None:
    """Claude Code gets its tool for skills, and not its own skills."""
    own = skills.launch(ClaudeCode(), TASK)
    instance = TASK.instance.model_copy(update={"skills_dir": "/skills"})
    with_skills = skills.launch(ClaudeCode(), replace(TASK, instance=instance))

    assert own == ClaudeCode().launch(TASK)
    assert "--disable-slash-commands" in own.argv
    assert "--disable-slash-commands" not in with_skills.argv
    assert with_skills.env["CLAUDE_CODE_DISABLE_BUNDLED_SKILLS"] == "1"


def test_an_agent_that_reads_no_skills_is_refused_by_name() -> None:
    instance = TASK.instance.model_copy(update={"skills_dir": "/skills"})
    with pytest.raises(ConfigurationError) as caught:
        skills.check("aider", Aider(), instance)

    assert "has skills in /skills, but agent 'aider' reads none" in str(caught.value)
    assert "claude_code, codex" in str(caught.value)
    skills.check("nop", Nop(), instance)  # it calls no model
    skills.check("aider", Aider(), TASK.instance)
