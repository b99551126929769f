"""Terminus 2 of Harbor 0.26.0 from PyPI, unmodified, run headless in the sandbox.

It types its model's keystrokes into a tmux session and reads the screen. `terminus_2_run.py` starts
it. The host needs tmux and Python 3.12 or later, which sandboxes get from the host.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from perdure.agents import tool_cache
from perdure.agents.base import EVIDENCE, AgentTask
from perdure.agents.python_runner import RunnerAgent, RunnerOptions
from perdure.sandboxes.base import Mount
from perdure.sandboxes.host import portable_program
from perdure.sandboxes.host.sandbox_programs import program
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd

TMUX = "/opt/tmux"
TRAJECTORY = f"{EVIDENCE}/trajectory.json"


class Terminus2Options(RunnerOptions):
    max_turns: int = Field(250, ge=1)
    """Limit on model calls outside summaries."""
    parser: Literal["json", "xml"] = "json"
    """How the model writes its keystrokes."""


class Terminus2(RunnerAgent[Terminus2Options]):
    name: ClassVar[str] = "terminus_2"
    artifacts: ClassVar[tuple[str, ...]] = (TRAJECTORY,)
    options = Terminus2Options
    behavior: ClassVar[Mapping[str, str]] = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True"
    }  # or it downloads prices
    ends: ClassVar[Mapping[str, AgentEnd]] = {
        "complete": AgentEnd.FINISHED,
        "max_turns": AgentEnd.LIMIT,
        "shell_left": AgentEnd.GAVE_UP,
    }

    def python(self, settings: AgentSettings) -> tool_cache.Python:
        named, variable = settings.terminus_2_python, "PERDURE_AGENTS__TERMINUS_2_PYTHON"
        return tool_cache.find_python("3.12", named, variable)

    def check_host(self, settings: AgentSettings) -> None:
        program("tmux")
        super().check_host(settings)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        digest = hashlib.sha256(Path(program("tmux")).read_bytes()).hexdigest()
        tmux = await tool_cache.built(tools, "tmux", digest, _build_tmux)
        return (Mount(source=tmux, target=TMUX), *await super().install(tools, settings))

    def program_settings(
        self, gateway_url: str, task: AgentTask, chosen: Terminus2Options
    ) -> dict[str, Any]:
        """Arguments of its class."""
        return {
            "logs_dir": EVIDENCE,
            "model_name": f"openai/{task.model}",
            "api_base": f"{gateway_url}/v1",
            "model_info": {
                "max_input_tokens": chosen.window(task),
                "max_output_tokens": chosen.answer(task),
            },
            "llm_call_kwargs": {
                "extra_headers": task.headers,
                "timeout": int(task.budget_s) + 1,  # the budget ends a slow turn, not the client
                "max_tokens": chosen.answer(task),
            },
            "max_turns": chosen.max_turns,
            "suppress_max_turns_warning": True,
            "parser_name": chosen.parser,
            "record_terminal_session": False,
        }


def _build_tmux(folder: Path) -> None:
    portable_program.write_program(program("tmux"), folder, TMUX)
    (folder / "bin").mkdir()
    (folder / "bin" / "tmux").symlink_to(f"../{portable_program.WRAPPER}")
