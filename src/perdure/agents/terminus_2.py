"""Terminus 2 of Harbor 0.26.0 from PyPI, unmodified, run headless in the sandbox.

It types its model's keystrokes into a tmux session and reads the screen. `terminus_2_run.py` starts
it. The host needs tmux, and a Python 3.12 or later, which are mounted too.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from perdure.agents import agent_options, headless_cli, tool_cache
from perdure.agents.base import EVIDENCE, HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_launch import headless_launch
from perdure.sandboxes.base import Mount
from perdure.sandboxes.host import portable_program
from perdure.sandboxes.host.sandbox_programs import program
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd

MOUNT = "/opt/terminus-2"
SETTINGS = f"{HOME}/terminus-2.json"
KEY = "OPENAI_API_KEY"
TRAJECTORY = f"{EVIDENCE}/trajectory.json"
LOCK = Path(__file__).parent / "locks" / "terminus_2.txt"
RUNNER = Path(__file__).parent / "in_sandbox" / "terminus_2_run.py"
PYTHON = "PERDURE_AGENTS__TERMINUS_2_PYTHON"
"""The setting that names the Python to use. Default: the first on this host from 3.12 on."""

BEHAVIOR: Mapping[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it downloads prices
ENDS = {
    "complete": AgentEnd.FINISHED,
    "max_turns": AgentEnd.LIMIT,
    "shell_left": AgentEnd.GAVE_UP,
}


class Terminus2Options(headless_cli.HeadlessOptions):
    max_turns: int = Field(250, ge=1)
    """Limit on model calls outside summaries."""
    parser: Literal["json", "xml"] = "json"
    """How the model writes its keystrokes."""

    @field_validator("extra_args")
    @classmethod
    def _refuse_flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        if flags:
            raise ValueError("terminus_2 has no flags")
        return flags


class Terminus2:
    name: ClassVar[str] = "terminus_2"
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = (TRAJECTORY,)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        python = await asyncio.to_thread(_python, settings)
        tmux = hashlib.sha256(Path(program("tmux")).read_bytes()).hexdigest()
        recipe = "\n".join((python.identity, tmux, LOCK.read_text(), RUNNER.read_text()))
        folder = await tool_cache.built(tools, self.name, recipe, lambda to: _build(to, python))
        return (Mount(source=folder, target=MOUNT), *python.mounts)

    def check_host(self, settings: AgentSettings) -> None:
        program("tmux")
        _python(settings)

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, Terminus2Options, task.options)
        gateway_url = headless_cli.gateway_of(self.name, task)
        # -I: a folder of the repository, or its PYTHONPATH, must not shadow the agent's imports.
        command = (f"{MOUNT}/bin/python", "-I", f"{MOUNT}/{RUNNER.name}", SETTINGS)
        fixed = {KEY: task.session_key, "HOME": HOME}
        env = headless_cli.environment(BEHAVIOR, fixed, chosen.extra_env)
        settings = {SETTINGS: _settings(gateway_url, task, chosen)}
        return headless_launch(task, chosen, command, env, settings)

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        told = headless_cli.events(evidence.stdout_tail)
        end = next((event for event in told if event.get("kind") == "perdure_end"), {})
        ended = ENDS.get(str(end.get("ended")), AgentEnd.CRASHED)
        return ended if evidence.status.ok else AgentEnd.CRASHED


def _python(settings: AgentSettings) -> tool_cache.Python:
    return tool_cache.find_python("3.12", settings.terminus_2_python, PYTHON)


def _build(folder: Path, python: tool_cache.Python) -> None:
    tool_cache.make_virtual_environment(folder, LOCK, str(python.executable))
    portable_program.write_program(program("tmux"), folder / "tmux", f"{MOUNT}/tmux")
    (folder / "bin" / "tmux").symlink_to(f"../tmux/{portable_program.WRAPPER}")
    shutil.copyfile(RUNNER, folder / RUNNER.name)


def _settings(gateway_url: str, task: AgentTask, chosen: Terminus2Options) -> dict[str, Any]:
    """Arguments of its class. They contain no key, because files are kept as evidence."""
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
