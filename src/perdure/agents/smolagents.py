"""smolagents 1.26.0 from PyPI, unmodified: its CodeAgent, which acts by writing Python.

`smolagents_run.py` starts it with one more tool, `bash`. The agent never compacts its history.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from perdure.agents.base import AgentTask
from perdure.agents.python_runner import RunnerAgent, RunnerOptions
from perdure.types import AgentEnd


class SmolagentsOptions(RunnerOptions):
    max_steps: int = Field(250, ge=1)
    """Limit on the agent's steps."""

    @field_validator("context_window")
    @classmethod
    def _refuse_context_window(cls, window: int | None) -> int | None:
        if window is not None:
            raise ValueError("smolagents never compacts; set sampling.max_context_tokens instead")
        return window


class Smolagents(RunnerAgent[SmolagentsOptions]):
    name: ClassVar[str] = "smolagents"
    options = SmolagentsOptions
    behavior: ClassVar[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ends: ClassVar[Mapping[str, AgentEnd]] = {
        "success": AgentEnd.FINISHED,
        "max_steps_error": AgentEnd.LIMIT,
        "context_full": AgentEnd.LIMIT,
    }

    def program_settings(
        self, gateway_url: str, task: AgentTask, chosen: SmolagentsOptions
    ) -> dict[str, Any]:
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
