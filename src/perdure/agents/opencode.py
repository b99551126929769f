"""opencode 1.18.33, the native package from npm, unmodified, run headless in the sandbox.

It speaks Chat Completions. Its standard output is one JSON event per line; its exit code says
little.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from perdure.agents import (
    agent_options,
    headless_cli,
    mcp_config,
    npm_packages,
    prompt_template,
    tool_cache,
)
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_cli import PROMPT
from perdure.errors import MissingDependency
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer

MOUNT = "/opt/opencode"
PACKAGE, RIPGREP = "/opt/opencode-package", "/opt/ripgrep"
WITH_RIPGREP = f"""#!/bin/sh
PATH="$PATH:{RIPGREP}/bin" exec {PACKAGE}/bin/opencode "$@"
"""
"""Its tools `grep`, `glob`, and `skill` need ripgrep, which it would download from GitHub."""
CONFIG = f"{HOME}/opencode.json"
KEY = f"{HOME}/session-key"
"""The file of the session key. Commands would inherit a variable."""
PROVIDER = "perdure"
TITLE = "rollout"
"""A fixed title. Without one, opencode asks the model for a title."""
CONTEXT = "ContextOverflowError"
NO_SUMMARY = "Tool call not allowed while generating summary"
"""The model called a tool instead of summarizing its history. That is the policy's failure, so it
is graded."""


class OpencodeOptions(headless_cli.HeadlessOptions):
    max_steps: int = Field(250, ge=0)
    """Limit on the main agent's model calls; 0 = none. opencode lets the last one use no tools."""


class Opencode:
    name: ClassVar[str] = "opencode"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    skills_folder: ClassVar[str] = f"{HOME}/.config/opencode/skills"
    artifacts: ClassVar[tuple[str, ...]] = (CONFIG,)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        package = await npm_packages.installed(tools, self.name, settings.opencode_tarball)
        ripgrep = await npm_packages.installed(tools, "ripgrep", settings.ripgrep_tarball)
        if not (ripgrep / "bin" / "rg").is_file():
            raise MissingDependency(
                f"{npm_packages.variable('ripgrep')} names a package without bin/rg: name "
                "@vscode/ripgrep-linux-x64"
            )
        start = await tool_cache.start_script(
            tools, "opencode_with_ripgrep", "bin/opencode", WITH_RIPGREP
        )
        return (
            Mount(source=start, target=MOUNT),
            Mount(source=package, target=PACKAGE),
            Mount(source=ripgrep, target=RIPGREP),
        )

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, OpencodeOptions, task.options)
        gateway_url = headless_cli.gateway_of(self.name, task)
        flags = ("--format", "json", "-m", f"{PROVIDER}/{task.model}", "--title", TITLE)
        command = (f"{MOUNT}/bin/opencode", "run", *flags, *chosen.extra_args)
        fixed = {"HOME": HOME, "OPENCODE_CONFIG": CONFIG}
        return Launch(
            argv=headless_cli.with_prompt(command),
            env=headless_cli.environment(_behaviour(), fixed, chosen.extra_env),
            files={
                PROMPT: prompt_template.render(chosen.prompt_template, task).encode(),
                CONFIG: json.dumps(_configuration(gateway_url, task, chosen)).encode(),
                KEY: task.session_key.encode(),
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        log = list(headless_cli.events(evidence.stdout_tail))
        steps = _steps_allowed(evidence.files.get(CONFIG, b""))
        if steps and sum(event.get("type") == "step_finish" for event in log) >= steps:
            return AgentEnd.LIMIT
        if error := next((e for e in log if e.get("type") == "error"), None):
            return _end_of_error(json.dumps(error))
        reason = _finish_reason(log)
        if reason == "length":
            return AgentEnd.LIMIT
        return AgentEnd.FINISHED if evidence.status.ok and reason == "stop" else AgentEnd.CRASHED


def _end_of_error(error: str) -> AgentEnd:
    if CONTEXT in error:
        return AgentEnd.LIMIT
    return AgentEnd.GAVE_UP if NO_SUMMARY in error else AgentEnd.CRASHED


def _finish_reason(log: list[dict[str, Any]]) -> str:
    """Why its newest finished step ended; "" if none has finished."""
    parts = (event.get("part") for event in log if event.get("type") == "step_finish")
    part = next(parts, None)
    return str(part.get("reason")) if isinstance(part, dict) else ""


def _steps_allowed(config: bytes) -> int:
    """The limit in its settings file, an artifact; 0 without one or if it is damaged."""
    try:
        steps = json.loads(config)["agent"]["build"]["steps"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return 0
    return steps if isinstance(steps, int) else 0


def _configuration(gateway_url: str, task: AgentTask, chosen: OpencodeOptions) -> dict[str, Any]:
    """Its own settings file. It contains no key, because it is kept as evidence."""
    name = f"{PROVIDER}/{task.model}"
    limits = {"context": chosen.window(task), "output": chosen.answer(task)}
    steps = {"steps": chosen.max_steps} if chosen.max_steps else {}
    return {
        "model": name,
        "small_model": name,
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "options": {
                    "baseURL": f"{gateway_url}/v1",
                    "apiKey": f"{{file:{KEY}}}",
                    "headers": task.headers,
                    "timeout": False,  # the budget ends a slow turn
                },
                "models": {task.model: {"name": task.model, "limit": limits}},
            }
        },
        "mcp": {name: _server(task, name, server) for name, server in task.mcp_servers.items()},
        "agent": {"build": steps},
        "permission": {"*": "allow", "webfetch": "deny", "websearch": "deny"},
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "compaction": {"auto": True, "prune": False},
        "lsp": False,
        "formatter": False,
    }


def _server(task: AgentTask, name: str, server: McpServer) -> dict[str, Any]:
    timeout = {"timeout": int(1000 * mcp_config.wait_s(server))}
    if at := mcp_config.address(task, name, key=f"{{file:{KEY}}}"):
        remote = {"type": "remote", "url": at.url, "oauth": False}
        return {**remote, "headers": dict(at.headers), **timeout}
    command = [server.command, *server.args]
    return {"type": "local", "command": command, "environment": server.env, **timeout}


def _behaviour() -> dict[str, str]:
    switched_on = (
        "OPENCODE_DISABLE_AUTOUPDATE",
        "OPENCODE_DISABLE_CLAUDE_CODE",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS",
        "OPENCODE_DISABLE_LSP_DOWNLOAD",
        "OPENCODE_DISABLE_MODELS_FETCH",
        "OPENCODE_DISABLE_PROJECT_CONFIG",
        "OPENCODE_DISABLE_SHARE",
    )
    return dict.fromkeys(switched_on, "1")
