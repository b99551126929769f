"""A task's skills reach each agent that reads skills, as its own home's skills."""

from pathlib import Path
from typing import Any

import pytest

from perdure import variant_registry
from perdure.agents.base import Agent
from perdure.sandboxes.base import Mount
from perdure.testing.agent_stand import INSTANCE, Run, Stand, call, script
from perdure.types import AgentEnd

pytestmark = pytest.mark.registry

FOLDER = "/skills"
WHEN = "Use this when you add two large numbers."
HOW = "First write both numbers below each other."
SKILL = f"---\nname: adding\ndescription: {WHEN}\n---\n\n{HOW}\n"
READING = {
    "claude_code": call("Skill", skill="adding"),
    "codex": call("exec_command", cmd="cat $HOME/.agents/skills/adding/SKILL.md"),
    "gemini_cli": call("activate_skill", name="adding"),
    "qwen_code": call("skill", skill="adding"),
    "opencode": call("skill", name="adding"),
}
"""Agent -> the call by which its model reads the skill."""


async def played(stand: Stand, name: str, folder: Path, *answers: dict[str, Any]) -> Run:
    """The model gives these answers, in an image with the skill."""
    (folder / "adding").mkdir(parents=True)
    (folder / "adding/SKILL.md").write_text(SKILL)
    agent: Agent = variant_registry.load("agent", variant_registry.AGENTS, name)()
    opening = [{"content": "Got it."}] if name == "qwen_code" else []
    scripts = script(*opening, *answers, {"content": "It is done."}, match="calc.py")
    instance = INSTANCE.model_copy(update={"skills_dir": FOLDER})
    return await stand.run(agent, scripts, instance=instance, mounted=[Mount(folder, FOLDER)])


@pytest.mark.parametrize("name", READING)
async def test_the_model_reads_a_skill(stand: Stand, name: str, tmp_path: Path) -> None:
    """It learns from the start when to use the skill, and by a call how."""
    run = await played(stand, name, tmp_path / "skills", READING[name])

    assert run.end is AgentEnd.FINISHED, run.said
    assert HOW in "".join(turn.new_messages for turn in run.turns[1:]), run.said
    assert WHEN in run.turns[0].new_messages + run.turns[0].tools, run.said
    run.assert_token_exact()
