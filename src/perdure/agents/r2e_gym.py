"""R2E-Gym's agent, reimplemented by its published tool format: no registry has its package.

`r2e_gym_run.py` has the loop and the tools file_editor, execute_bash, search and finish. It never
compacts its history.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from perdure.agents.base import AgentTask
from perdure.agents.python_runner import RunnerAgent, RunnerOptions
from perdure.types import AgentEnd


class R2eGymOptions(RunnerOptions):
    max_steps: int = Field(40, ge=1)
    """Steps after which the model is told to submit."""
    max_steps_absolute: int = Field(50, ge=1)
    """Limit on the agent's steps."""
    use_fn_calling: bool = True
    """False: the model writes its calls as text, `<function=NAME>`, as R2E-Gym's own models do."""


class R2eGym(RunnerAgent[R2eGymOptions]):
    name: ClassVar[str] = "r2e_gym"
    options = R2eGymOptions
    behavior: ClassVar[Mapping[str, str]] = {}
    ends: ClassVar[Mapping[str, AgentEnd]] = {
        "agent": AgentEnd.FINISHED,
        "abs_step_limit": AgentEnd.LIMIT,
        "token_limit": AgentEnd.LIMIT,
    }

    def program_settings(
        self, gateway_url: str, task: AgentTask, chosen: R2eGymOptions
    ) -> dict[str, Any]:
        return {
            "url": f"{gateway_url}/v1/chat/completions",
            "headers": task.headers,
            "timeout_s": int(task.budget_s) + 1,  # the budget ends a slow turn, not the client
            "body": {"model": task.model, "max_tokens": chosen.answer(task)},
            "max_token_limit": chosen.window(task),
            "max_steps": chosen.max_steps,
            "max_steps_absolute": chosen.max_steps_absolute,
            "use_fn_calling": chosen.use_fn_calling,
        }
