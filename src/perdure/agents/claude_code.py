"""Claude Code 2.1.329, the native package from npm, unmodified, run headless in the sandbox.

Its standard output is its log, one JSON object per line; the last `result` says how it ended.
"""

import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, JsonValue

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
from perdure.errors import MissingDependency, PerdureError
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer

MOUNT = "/opt/claude-code"
PACKAGE, NODE = "/opt/claude-code-package", "/opt/claude-code-node"
ON_NODE = f"""#!/bin/sh
exec {NODE}/bin/node {PACKAGE}/cli.js "$@"
"""
"""The program `claude` for an npm package that runs on Node."""
COMMAND_ENV = f"{HOME}/command-env.sh"
"""Claude Code sources this file before each command of its Bash tool."""
MCP_CONFIG = f"{HOME}/mcp.json"
TOOLS = ("Bash", "Read", "Edit", "Write", "Grep", "Glob", "Agent")
"""Without WebFetch and WebSearch, because sandboxes reach no web hosts."""
SKILL_TOOL = "Skill"
"""The tool that reads a skill; only tasks with skills have it."""
SKILLS_ONLY = {
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1",
    "SLASH_COMMAND_TOOL_CHAR_BUDGET": "8000",  # its default depends on the context window
}
"""With these variables, the prompt lists the task's skills and their descriptions, in up to 8,000
characters, and no skills of Claude Code."""
LIMITS = {"max_turns", "budget_exhausted", "prompt_too_long", "blocking_limit"}
"""Values of `terminal_reason` for a limit, as opposed to an answer or an error."""
CUT_OFF = re.compile(r"exceeded the \d+ output token maximum")
"""Its message after the token limit cut off four answers; `terminal_reason` is `api_error`."""


class ClaudeCodeOptions(headless_cli.HeadlessOptions):
    max_turns: int = Field(250, ge=0)
    """Limit on the main agent's model calls; 0 = none."""
    tools: tuple[str, ...] = Field(TOOLS, min_length=1)
    """Tools that it may use; a shorter list makes a shorter prompt."""
    agents: dict[str, JsonValue] = Field(default_factory=dict)
    """Sub-agents to register, in the form of `--agents`: name -> description, prompt, tools."""
    small_model: str = ""
    """The model name of its calls to a small model, which the request's `models` may map. If empty,
    the rollout's model."""


class ClaudeCode:
    name: ClassVar[str] = "claude_code"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    skills_folder: ClassVar[str] = f"{HOME}/.claude/skills"
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        folder = await npm_packages.installed(tools, self.name, settings.claude_code_tarball)
        if (folder / "claude").is_file():
            return (Mount(source=folder, target=MOUNT),)
        if not (folder / "cli.js").is_file():
            raise MissingDependency(
                f"{npm_packages.variable(self.name)} (SWE_HOST_CC_TARBALL) names {settings.claude_code_tarball}, "
                "which has neither the program `claude` nor `cli.js`: name the native package "
                "@anthropic-ai/claude-code-linux-x64, or one that runs on Node"
            )
        try:
            node = await npm_packages.installed(tools, "node", settings.node_tarball)
        except PerdureError as error:
            raise MissingDependency(
                f"{npm_packages.variable(self.name)} (SWE_HOST_CC_TARBALL) names a package that needs Node: name "
                f"Node's tarball in {npm_packages.variable('node')} (SWE_HOST_NODE_TARBALL), or the native package "
                f"@anthropic-ai/claude-code-linux-x64; {error}"
            ) from error
        start = await tool_cache.start_script(tools, "claude_code_on_node", "claude", ON_NODE)
        return (
            Mount(source=start, target=MOUNT),
            Mount(source=folder, target=PACKAGE),
            Mount(source=node, target=NODE),
        )

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, ClaudeCodeOptions, task.options)
        fixed = _connection(headless_cli.gateway_of(self.name, task), task, chosen)
        env = headless_cli.environment(_behaviour(task, chosen), fixed, chosen.extra_env)
        return Launch(
            argv=headless_cli.with_prompt((f"{MOUNT}/claude", *_flags(task, chosen))),
            env=env,
            files={
                PROMPT: prompt_template.render(chosen.prompt_template, task).encode(),
                MCP_CONFIG: json.dumps({"mcpServers": _servers(task)}).encode(),
                COMMAND_ENV: f"unset {' '.join(fixed)}\n".encode(),
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        result = _last_result(evidence.stdout_tail)
        if str(result.get("terminal_reason")) in LIMITS or CUT_OFF.search(
            str(result.get("result"))
        ):
            return AgentEnd.LIMIT
        if evidence.status.ok and result.get("is_error") is False:
            return AgentEnd.FINISHED
        return AgentEnd.CRASHED


def _flags(task: AgentTask, chosen: ClaudeCodeOptions) -> tuple[str, ...]:
    headless_flags = ("-p", "--output-format", "stream-json", "--verbose")
    has_skills = bool(task.instance.skills_dir)
    tools = (*chosen.tools, SKILL_TOOL) if has_skills else chosen.tools
    no_skills = () if has_skills else ("--disable-slash-commands",)
    alone = (*no_skills, "--strict-mcp-config", "--setting-sources", "user")
    turns = ("--max-turns", str(chosen.max_turns)) if chosen.max_turns else ()
    agents = ("--agents", json.dumps(chosen.agents)) if chosen.agents else ()
    return (
        *headless_flags,
        "--dangerously-skip-permissions",
        *("--session-id", _session_id(task)),
        *("--tools", ",".join(tools)),
        *("--mcp-config", MCP_CONFIG),
        *turns,
        *agents,
        *alone,
        *chosen.extra_args,
    )


def _session_id(task: AgentTask) -> str:
    """An id that is the same for every sample of an instance, because it may appear in prompts,
    which should be equal."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"perdure:{task.instance.ref}"))


def _connection(gateway_url: str, task: AgentTask, chosen: ClaudeCodeOptions) -> dict[str, str]:
    """Sets every model name that it uses, because the name decides the form of its requests."""
    small = ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    models = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )
    return {
        "ANTHROPIC_BASE_URL": gateway_url,
        "ANTHROPIC_AUTH_TOKEN": task.session_key,
        "ANTHROPIC_CUSTOM_HEADERS": "\n".join(f"{n}: {v}" for n, v in task.headers.items()),
        "CLAUDE_ENV_FILE": COMMAND_ENV,
        **dict.fromkeys(models, task.model),
        **dict.fromkeys(small, chosen.small_model or task.model),
    }


def _servers(task: AgentTask) -> dict[str, Any]:
    return {name: _server(task, name, server) for name, server in task.mcp_servers.items()}


def _server(task: AgentTask, name: str, server: McpServer) -> dict[str, Any]:
    key = task.session_key  # it expands no variable of a credential
    if at := mcp_config.address(task, name, key=key):
        return {"type": at.transport, "url": at.url, "headers": dict(at.headers)}
    return {"command": server.command, "args": server.args, "env": server.env}


def _behaviour(task: AgentTask, chosen: ClaudeCodeOptions) -> Mapping[str, str]:
    switched_on = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS",  # it would retry a refused request in other forms
        "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS",  # sub-agents answer before the next turn starts
        "CLAUDE_CODE_DISABLE_AUTO_MEMORY",
        "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS",
        "DISABLE_AUTOUPDATER",
        "DISABLE_PROMPT_CACHING",  # its cache marks would change the history at each turn
        "IS_SANDBOX",  # it would refuse to run as root, and images have only root
    )
    waits = (1000 * mcp_config.wait_s(server) for server in task.mcp_servers.values())
    longest = str(int(max(waits, default=0)))
    return {
        **dict.fromkeys(switched_on, "1"),
        **(dict.fromkeys(("MCP_TIMEOUT", "MCP_TOOL_TIMEOUT"), longest) if task.mcp_servers else {}),
        **(SKILLS_ONLY if task.instance.skills_dir else {}),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it adds a system text that differs per chain
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(chosen.answer(task)),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(chosen.window(task)),
        "API_TIMEOUT_MS": str(int(task.budget_s * 1000) + 1000),  # the budget ends a slow turn
        "HOME": HOME,
    }


def _last_result(stdout: bytes) -> dict[str, Any]:
    """The last result; with a background task, Claude Code prints two."""
    found = (event for event in headless_cli.events(stdout) if event.get("type") == "result")
    return next(found, {})
