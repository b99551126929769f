"""smolagents 1.26.0 from PyPI, unmodified: its CodeAgent, which acts by writing Python.

`smolagents_run.py` starts it with one more tool, `bash`. It never compacts its history.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from perdure.agents import agent_options, headless_cli, tool_cache
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_launch import headless_launch
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd

MOUNT = "/opt/smolagents"
SETTINGS = f"{HOME}/smolagents.json"
LOCK = Path(__file__).parent / "locks" / "smolagents.txt"
RUNNER = Path(__file__).parent / "in_sandbox" / "smolagents_run.py"
CONTEXT_FULL = "context_length_exceeded"
BEHAVIOR: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


class SmolagentsOptions(headless_cli.HeadlessOptions):
    max_steps: int = Field(250, ge=1)
    """Limit on the agent's steps."""

    @field_validator("context_window")
    @classmethod
    def _refuse_context_window(cls, window: int | None) -> int | None:
        if window is not None:
            raise ValueError("smolagents never compacts; set sampling.max_context_tokens instead")
        return window


class Smolagents:
    name: ClassVar[str] = "smolagents"
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        recipe = "\n".join((tool_cache.python_identity(), LOCK.read_text(), RUNNER.read_text()))
        folder = await tool_cache.built(tools, self.name, recipe, _build)
        return (Mount(source=folder, target=MOUNT),)

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, SmolagentsOptions, task.options)
        gateway_url = headless_cli.gateway_of(self.name, task)
        # -I: a folder of the repository, or its PYTHONPATH, must not shadow the agent's imports.
        command = (f"{MOUNT}/bin/python", "-I", f"{MOUNT}/{RUNNER.name}", SETTINGS)
        fixed = {"PERDURE_SESSION_KEY": task.session_key, "HOME": HOME}
        env = headless_cli.environment(BEHAVIOR, fixed, chosen.extra_env)
        settings = {SETTINGS: _settings(gateway_url, task, chosen)}
        return headless_launch(task, chosen, command, env, settings)

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        told = headless_cli.events(evidence.stdout_tail)
        end = next((event for event in told if event.get("kind") == "perdure_end"), {})
        if end.get("state") == "max_steps_error" or CONTEXT_FULL in str(end.get("error")):
            return AgentEnd.LIMIT
        finished = evidence.status.ok and end.get("state") == "success"
        return AgentEnd.FINISHED if finished else AgentEnd.CRASHED


def _build(folder: Path) -> None:
    tool_cache.make_virtual_environment(folder, LOCK)
    shutil.copyfile(RUNNER, folder / RUNNER.name)


def _settings(gateway_url: str, task: AgentTask, chosen: SmolagentsOptions) -> dict[str, Any]:
    """Input of `smolagents_run.py`. It contains no key, because files are kept as evidence."""
    timeout = int(task.budget_s) + 1  # the budget ends a slow turn, not the client
    return {
        "model": {
            "model_id": task.model,
            "api_base": f"{gateway_url}/v1",
            "client_kwargs": {"default_headers": task.headers, "timeout": timeout},
            "max_tokens": chosen.answer(task),
        },
        "max_steps": chosen.max_steps,
    }
