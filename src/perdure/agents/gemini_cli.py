"""Gemini CLI 0.61.0 from npm with Perdure's own Node, unmodified, run headless in the sandbox.

It speaks Google's generateContent. Its standard output is one JSON event per line; the last `result`
says how it ended. It summarizes its history only between two prompts, so never in a rollout.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from perdure.agents import agent_options, headless_cli, mcp_config, npm_packages, prompt_template
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_cli import PROMPT
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer

MOUNT = "/opt/gemini-cli"
NODE = "/opt/node"
SETTINGS = f"{HOME}/.gemini/settings.json"
COMMAND_ENV = f"{HOME}/command-env.sh"
"""Bash sources this file before each command that Gemini CLI runs."""
EXPERIMENTS = f"{HOME}/.gemini/experiments.json"
REQUEST_TIMEOUT_FLAG = 45773134
"""Gemini CLI's number of the flag that sets how many seconds an answer may take to begin."""
TURN_LIMIT_EXIT_CODE = 53
"""Gemini CLI's exit code when it reaches `maxSessionTurns`."""
CONTEXT_FULL = "exceeds the maximum number of tokens"
BEHAVIOR = {
    "GEMINI_CLI_NO_RELAUNCH": "true",  # otherwise it restarts itself with more memory
    "GEMINI_EXP": EXPERIMENTS,
}


class GeminiCliOptions(headless_cli.HeadlessOptions):
    max_turns: int = Field(250, ge=0)
    """Limit on the main agent's model calls; 0 = none."""

    @field_validator("context_window")
    @classmethod
    def _refuse_context_window(cls, window: int | None) -> int | None:
        if window is not None:
            raise ValueError(
                "Gemini CLI has no such option; set sampling.max_context_tokens instead"
            )
        return window


class GeminiCli:
    name: ClassVar[str] = "gemini_cli"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    skills_folder: ClassVar[str] = f"{HOME}/.gemini/skills"
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        program = await npm_packages.installed(tools, self.name, settings.gemini_cli_tarball)
        node = await npm_packages.installed(tools, "node", settings.node_tarball)
        return (Mount(source=program, target=MOUNT), Mount(source=node, target=NODE))

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, GeminiCliOptions, task.options)
        fixed = _connection(headless_cli.gateway_of(self.name, task), task)
        program = (f"{NODE}/bin/node", f"{MOUNT}/bundle/gemini.js")
        flags = ("--yolo", "--output-format", "stream-json", "--model", task.model)
        return Launch(
            argv=headless_cli.with_prompt((*program, *flags, *chosen.extra_args)),
            env=headless_cli.environment(BEHAVIOR, fixed | {"HOME": HOME}, chosen.extra_env),
            files={
                PROMPT: prompt_template.render(chosen.prompt_template, task).encode(),
                SETTINGS: json.dumps(_settings(task, chosen)).encode(),
                EXPERIMENTS: json.dumps(_experiments(task)).encode(),
                COMMAND_ENV: f"unset {' '.join(fixed)}\n".encode(),
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        found = headless_cli.events(evidence.stdout_tail)
        result = next((event for event in found if event.get("type") == "result"), {})
        if evidence.status.ok and result.get("status") == "success":
            return AgentEnd.FINISHED
        if evidence.status.code == TURN_LIMIT_EXIT_CODE or CONTEXT_FULL in str(result.get("error")):
            return AgentEnd.LIMIT
        return AgentEnd.CRASHED


def _connection(gateway_url: str, task: AgentTask) -> dict[str, str]:
    """Variables that commands do not inherit."""
    return {
        "GOOGLE_GEMINI_BASE_URL": gateway_url,
        "GEMINI_API_KEY": task.session_key,
        "GEMINI_CLI_CUSTOM_HEADERS": ", ".join(f"{n}: {v}" for n, v in task.headers.items()),
        "BASH_ENV": COMMAND_ENV,
    }


def _settings(task: AgentTask, chosen: GeminiCliOptions) -> dict[str, Any]:
    generation = {"maxOutputTokens": chosen.answer(task)}
    return {
        "security": {
            "auth": {"selectedType": "gemini-api-key"},
            "folderTrust": {"enabled": False},  # otherwise it refuses to approve its own actions
        },
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {
            "maxSessionTurns": chosen.max_turns or -1,
            "disableLoopDetection": True,  # it would ask the policy to judge
        },
        "modelConfigs": {
            "customOverrides": [
                {
                    "match": {"model": task.model},
                    "modelConfig": {"generateContentConfig": generation},
                }
            ]
        },
        "mcpServers": {
            name: _server(task, name, server) for name, server in task.mcp_servers.items()
        },
        "tools": {"exclude": ["google_web_search", "web_fetch"]},  # sandboxes reach no web hosts
        "advanced": {"ignoreLocalEnv": True},  # a repository's .env could name another endpoint
    }


def _server(task: AgentTask, name: str, server: McpServer) -> dict[str, Any]:
    common = {"timeout": int(1000 * mcp_config.wait_s(server)), "trust": True}
    if at := mcp_config.address(task, name, key="${GEMINI_API_KEY}"):
        field = "url" if at.transport == "sse" else "httpUrl"
        return {field: at.url, "headers": dict(at.headers), **common}
    return {"command": server.command, "args": server.args, "env": server.env, **common}


def _experiments(task: AgentTask) -> dict[str, Any]:
    """Raises the client's limit of 60 seconds, so that only the agent's budget ends a slow turn."""
    seconds = str(int(task.budget_s) + 1)
    return {"flags": [{"flagId": REQUEST_TIMEOUT_FLAG, "intValue": seconds}], "experimentIds": []}
