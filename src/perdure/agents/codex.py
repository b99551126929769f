"""codex 0.169.0, the static binary from npm, unmodified, run headless in the sandbox.

It speaks only OpenAI's Responses API. Its standard output is one JSON event per line.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

from perdure.agents import agent_options, headless_cli, mcp_config, npm_packages, prompt_template
from perdure.agents.base import EVIDENCE, HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_cli import PROMPT
from perdure.errors import AgentError, ConfigurationError
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer

MOUNT = "/opt/codex"
CONFIG = f"{HOME}/.codex/config.toml"
LAST_MESSAGE = f"{EVIDENCE}/last-message.txt"
KEY = "PERDURE_SESSION_KEY"
COMPACT_AT = 0.8
"""Fraction of the context window at which it summarizes its history."""
CONTEXT_WORDS = ("context_length_exceeded", "context window")
"""Parts of its last error if neither the task nor a summary fits the context window."""


class Codex:
    name: ClassVar[str] = "codex"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    skills_folder: ClassVar[str] = f"{HOME}/.agents/skills"
    artifacts: ClassVar[tuple[str, ...]] = (LAST_MESSAGE,)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        folder = await npm_packages.installed(tools, self.name, settings.codex_tarball)
        programs = [found.parent.parent for found in folder.glob("vendor/*/bin/codex")]
        if len(programs) != 1:
            raise AgentError(f"{folder}: not a package of {self.name} for one platform")
        return (Mount(source=programs[0], target=MOUNT),)

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, headless_cli.HeadlessOptions, task.options)
        gateway_url = headless_cli.gateway_of(self.name, task)
        flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        command = (f"{MOUNT}/bin/codex", "exec", *flags, "-o", LAST_MESSAGE, *chosen.extra_args)
        env = headless_cli.environment({}, {KEY: task.session_key, "HOME": HOME}, chosen.extra_env)
        return Launch(
            argv=headless_cli.with_prompt((*command, "-")),
            env=env,
            files={
                PROMPT: prompt_template.render(chosen.prompt_template, task).encode(),
                CONFIG: _toml(_configuration(gateway_url, task, chosen)),
                f"{EVIDENCE}/.keep": b"",
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        if evidence.status.ok and _last(evidence.stdout_tail, "turn.completed"):
            return AgentEnd.FINISHED
        failure = json.dumps(_last(evidence.stdout_tail, "turn.failed"))
        if any(words in failure for words in CONTEXT_WORDS):
            return AgentEnd.LIMIT
        return AgentEnd.CRASHED


def _configuration(
    gateway_url: str, task: AgentTask, chosen: headless_cli.HeadlessOptions
) -> dict[str, Any]:
    """Its own settings file. It contains no key, because files are kept as evidence."""
    window = chosen.window(task)
    return {
        "model": task.model,
        "model_provider": "perdure",
        "model_context_window": window,
        "model_auto_compact_token_limit": int(window * COMPACT_AT),
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        "allow_login_shell": False,  # /etc/profile of an image would replace the instance's PATH
        "analytics": {"enabled": False},
        "shell_environment_policy": {"exclude": [KEY]},
        "model_providers.perdure": {
            "name": "perdure",
            "base_url": f"{gateway_url}/v1",
            "env_key": KEY,
            "wire_api": "responses",
            "stream_idle_timeout_ms": int(task.budget_s * 1000) + 1000,  # the budget ends it
        },
        "model_providers.perdure.http_headers": task.headers,
        **{
            f"mcp_servers.{name}": _server(task, name, server)
            for name, server in task.mcp_servers.items()
        },
        **{
            f"mcp_servers.{name}.env": server.env
            for name, server in task.mcp_servers.items()
            if server.env
        },
    }


def _server(task: AgentTask, name: str, server: McpServer) -> dict[str, Any]:
    waits_s = int(mcp_config.wait_s(server))
    times = {"startup_timeout_sec": waits_s, "tool_timeout_sec": waits_s, "required": True}
    if server.is_behind_gateway:
        url = mcp_config.gateway_url(task, name)
        return {"url": url, "bearer_token_env_var": KEY, **times}
    if server.type == "sse":
        raise ConfigurationError(
            f"MCP server {name!r} in the sandbox uses `sse`, which codex cannot: serve it over "
            "streamable HTTP, or choose another agent"
        )
    if server.has_address:
        return {"url": server.url, "http_headers": server.headers, **times}
    return {"command": server.command, "args": server.args, **times}


def _toml(settings: dict[str, Any]) -> bytes:
    """Plain values, then one table per nested dict. JSON strings are valid TOML strings."""
    plain = [_line(name, value) for name, value in settings.items() if not isinstance(value, dict)]
    tables = [
        f"[{name}]\n" + "".join(_line(*item) for item in table.items())
        for name, table in settings.items()
        if isinstance(table, dict)
    ]
    return "".join([*plain, *tables]).encode()


def _line(name: str, value: object) -> str:
    return f"{name} = {json.dumps(value, ensure_ascii=False)}\n"


def _last(stdout: bytes, kind: str) -> dict[str, Any]:
    found = (event for event in headless_cli.events(stdout) if event.get("type") == kind)
    return next(found, {})
