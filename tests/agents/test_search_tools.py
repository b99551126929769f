"""Each agent's own search tools work in an image that lacks their programs, without a network."""

from typing import Any

import pytest

from perdure import variant_registry
from perdure.agents.base import Agent
from perdure.testing.agent_stand import FILE, Stand, call, script
from perdure.types import AgentEnd

pytestmark = pytest.mark.registry

SEARCHES = {
    "claude_code-Grep": call("Grep", pattern="def add", output_mode="content"),
    "claude_code-Glob": call("Glob", pattern="**/*.py"),
    "gemini_cli-grep": call("grep_search", pattern="def add"),
    "gemini_cli-glob": call("glob", pattern="**/*.py"),
    "qwen_code-grep": call("grep_search", pattern="def add"),
    "qwen_code-glob": call("glob", pattern="**/*.py"),
    "opencode-grep": call("grep", pattern="def add"),
    "opencode-glob": call("glob", pattern="**/*.py"),
}


@pytest.mark.parametrize(("label", "search"), SEARCHES.items(), ids=SEARCHES)
async def test_a_search_finds_the_file(stand: Stand, label: str, search: dict[str, Any]) -> None:
    """The answer names the file."""
    name, _, _ = label.partition("-")
    agent: Agent = variant_registry.load("agent", variant_registry.AGENTS, name)()
    opening = [{"content": "Got it."}] if name == "qwen_code" else []
    run = await stand.run(
        agent, script(*opening, search, {"content": "It is there."}, match="calc.py")
    )

    assert run.end is AgentEnd.FINISHED, run.said
    assert FILE.rpartition("/")[2] in run.turns[-1].new_messages, run.turns[-1].new_messages
