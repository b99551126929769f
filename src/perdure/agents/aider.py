"""Aider 0.86.2 from PyPI, unmodified, run headless in the sandbox.

The task is one message: the model names files, edits them, and repairs edits that do not apply, in
at most four calls. Aider exits with 0 even if it could not call the model.
"""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

from perdure.agents import agent_options, headless_cli, prompt_template, python_runner, tool_cache
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_cli import PROMPT
from perdure.errors import MissingDependency
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd

MODEL_SETTINGS = f"{HOME}/model-settings.json"
MODEL_METADATA = f"{HOME}/model-metadata.json"
RUNNER = "aider_run.py"
UNSUPPORTED_PYTHON = (3, 13)
"""The first Python for which aider has no packages."""
CONTEXT_FULL = b"has hit a token limit!"
HEADLESS_FLAGS = (
    "--analytics-disable",
    "--no-check-update",
    "--no-detect-urls",  # sandboxes reach no web hosts
    "--no-fancy-input",
    "--no-pretty",
    "--no-show-model-warnings",
    "--no-show-release-notes",
)
NO_COMMIT_FLAGS = ("--no-auto-commits", "--no-dirty-commits", "--no-gitignore")
"""It leaves the repository's history and `.gitignore` as they are."""
BEHAVIOR = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise it downloads prices


class AiderOptions(headless_cli.HeadlessOptions):
    edit_format: Literal["diff", "whole", "udiff"] = "diff"
    """How the model writes its edits, in aider's words."""


class Aider:
    name: ClassVar[str] = "aider"
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        self.check_host(settings)
        return await python_runner.install(tools, self.name, RUNNER, tool_cache.own_python())

    def check_host(self, settings: AgentSettings) -> None:
        if sys.version_info >= UNSUPPORTED_PYTHON:
            raise MissingDependency("aider needs Perdure on Python 3.11 or 3.12")

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, AiderOptions, task.options)
        gateway_url = headless_cli.gateway_of(self.name, task)
        program = python_runner.command(self.name, RUNNER)
        model = ("--model", f"openai/{task.model}", "--edit-format", chosen.edit_format)
        files = ("--model-settings-file", MODEL_SETTINGS, "--model-metadata-file", MODEL_METADATA)
        histories = (
            *("--chat-history-file", f"{HOME}/chat-history.md"),
            *("--input-history-file", f"{HOME}/input-history"),
        )
        flags = ("--yes-always", "--message-file", PROMPT, *model, *files, *histories)
        return Launch(
            argv=(*program, *flags, *HEADLESS_FLAGS, *NO_COMMIT_FLAGS, *chosen.extra_args),
            env=headless_cli.environment(BEHAVIOR, {"HOME": HOME}, chosen.extra_env),
            files={
                PROMPT: prompt_template.render(chosen.prompt_template, task).encode(),
                MODEL_SETTINGS: json.dumps([_model_settings(gateway_url, task, chosen)]).encode(),
                MODEL_METADATA: json.dumps(
                    {f"openai/{task.model}": _model_metadata(task, chosen)}
                ).encode(),
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        if not evidence.status.ok:
            return AgentEnd.CRASHED
        return AgentEnd.LIMIT if CONTEXT_FULL in evidence.stdout_tail else AgentEnd.FINISHED


def _model_settings(gateway_url: str, task: AgentTask, chosen: AiderOptions) -> dict[str, Any]:
    """How aider calls the model. The key is in a file, because commands would inherit variables."""
    return {
        "name": f"openai/{task.model}",
        "edit_format": chosen.edit_format,
        "weak_model_name": f"openai/{task.model}",
        "use_repo_map": True,
        "extra_params": {
            "api_base": f"{gateway_url}/v1",
            "api_key": task.session_key,
            "extra_headers": task.headers,
            "max_tokens": chosen.answer(task),
            "timeout": int(task.budget_s) + 1,  # the budget ends a slow turn, not the client
        },
    }


def _model_metadata(task: AgentTask, chosen: AiderOptions) -> dict[str, Any]:
    """The model's limits and prices. Without them, aider looks the model up on the web."""
    return {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": chosen.window(task),
        "max_output_tokens": chosen.answer(task),
        "input_cost_per_token": 0.0,
        "output_cost_per_token": 0.0,
    }
