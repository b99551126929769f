"""Qwen Code 0.15.10 from npm with its own Node, unmodified, run headless in the sandbox.

It speaks Chat Completions. After an API error it exits with 0; only the text of its result names
the error.
"""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from perdure.agents import agent_options, headless_cli, mcp_config, npm_packages
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_launch import headless_launch
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer

MOUNT = "/opt/qwen-code"
NODE = "/opt/node"
SETTINGS = f"{HOME}/.qwen/settings.json"
TOO_MANY_TURNS = 53
"""Its exit code at `--max-session-turns`."""
API_ERROR, CONTEXT = "[API Error:", "maximum context length"
_BEHAVIOR = {"QWEN_CODE_NO_RELAUNCH": "true"}  # otherwise it restarts itself with more memory


class QwenCodeOptions(headless_cli.HeadlessOptions):
    max_turns: int = Field(250, ge=0)
    """Limit on the main agent's model calls; 0 = none."""


class QwenCode:
    name: ClassVar[str] = "qwen_code"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    skills_folder: ClassVar[str] = f"{HOME}/.qwen/skills"
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        program = await npm_packages.installed(tools, self.name, settings.qwen_code_tarball)
        node = await npm_packages.installed(tools, "node", settings.node_tarball)
        return (Mount(source=program, target=MOUNT), Mount(source=node, target=NODE))

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, QwenCodeOptions, task.options)
        gateway_url = headless_cli.gateway_of(self.name, task)
        turns = ("--max-session-turns", str(chosen.max_turns)) if chosen.max_turns else ()
        flags = ("--yolo", "--output-format", "stream-json", "--auth-type", "openai")
        command = (f"{NODE}/bin/node", f"{MOUNT}/cli.js", *flags, *turns)
        env = headless_cli.environment(_BEHAVIOR, {"HOME": HOME}, chosen.extra_env)
        settings = {SETTINGS: _settings(gateway_url, task, chosen)}
        return headless_launch(task, chosen, command, env, settings)

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        if evidence.status.code == TOO_MANY_TURNS:
            return AgentEnd.LIMIT
        log = list(headless_cli.events(evidence.stdout_tail))
        result = next((event for event in log if event.get("type") == "result"), {})
        if not evidence.status.ok or result.get("is_error") is not False:
            return AgentEnd.CRASHED
        text = str(result.get("result"))
        if not text.startswith(API_ERROR) or _was_sampled(log):
            return AgentEnd.FINISHED
        return AgentEnd.LIMIT if CONTEXT in text else AgentEnd.CRASHED


def _was_sampled(log: list[dict[str, Any]]) -> bool:
    """Whether the model wrote its last text, because such a text may look like an API error."""
    said = next((event.get("message") for event in log if event.get("type") == "assistant"), None)
    usage = said.get("usage") if isinstance(said, dict) else None
    return isinstance(usage, dict) and bool(usage.get("output_tokens"))


def _settings(gateway_url: str, task: AgentTask, chosen: QwenCodeOptions) -> dict[str, Any]:
    """Its own settings file, which is not kept as evidence. Commands would inherit variables."""
    generation = {
        "customHeaders": task.headers,
        "timeout": int(task.budget_s * 1000) + 1000,  # the budget ends a slow turn
        "contextWindowSize": chosen.window(task),
        "samplingParams": {"max_tokens": chosen.answer(task)},
    }
    return {
        "model": {"name": task.model, "generationConfig": generation},
        "security": {
            "auth": {
                "selectedType": "openai",
                "apiKey": task.session_key,
                "baseUrl": f"{gateway_url}/v1",
            }
        },
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "mcpServers": {
            name: _server(task, name, server) for name, server in task.mcp_servers.items()
        },
        "tools": {"exclude": ["web_fetch"]},  # sandboxes reach no web hosts
    }


def _server(task: AgentTask, name: str, server: McpServer) -> dict[str, Any]:
    common = {"timeout": int(1000 * mcp_config.wait_s(server)), "trust": True}
    if at := mcp_config.address(task, name, key=task.session_key):
        field = "url" if at.transport == "sse" else "httpUrl"
        return {field: at.url, "headers": dict(at.headers), **common}
    return {"command": server.command, "args": server.args, "env": server.env, **common}
