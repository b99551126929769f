"""The agents of Perdure that also speak the Agent Client Protocol, and how to start them as servers.

Each takes its program, settings and variables from the agent's own module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from perdure import variant_registry
from perdure.agents import npm_install
from perdure.agents.base import HOME, Agent, AgentTask, Launch
from perdure.agents.headless_cli import PROMPT
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings

PACKAGES = "/opt/acp-server"
"""Where the npm package of a server is mounted, with its dependencies."""


@dataclass(frozen=True)
class AcpServer:
    """How to start an agent as a server.

    `command` may contain `{model}`. `lock`: the npm package of an adapter that starts the agent's
    own program, if the agent needs one. `files`: extra settings files. `session_meta`: the field
    `_meta` of `session/new`. `failure`: the part of an update that reports a failed turn, if the
    server ends such a turn like a successful one. `configures_mcp`: MCP servers are named in the
    agent's settings file instead of `session/new`.
    """

    agent: str
    command: tuple[str, ...]
    lock: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    session_meta: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    configures_mcp: bool = False

    @property
    def harness(self) -> Agent:
        agent: Agent = variant_registry.load("agent", variant_registry.AGENTS, self.agent)()
        return agent

    async def install(
        self, tools: Path, settings: AgentSettings, package: str
    ) -> tuple[Mount, ...]:
        """The mounts of the agent, and of its adapter unless `package` replaces it."""
        mounts = await self.harness.install(tools, settings)
        if not self.lock or package:
            return mounts
        adapter = await npm_install.installed_from_lock(tools, settings, self.lock)
        return (*mounts, Mount(source=adapter, target=PACKAGES))

    def launch(self, task: AgentTask, options: Mapping[str, JsonValue]) -> Launch:
        """The agent's own variables and settings files, without its prompt.

        Raises: ConfigurationError naming an option that the agent does not have.
        """
        servers = task.mcp_servers if self.configures_mcp else {}
        own = self.harness.launch(replace(task, options=options, mcp_servers=servers))
        files = {path: content for path, content in own.files.items() if path != PROMPT}
        files |= self.files
        argv = tuple(part.replace("{model}", task.model) for part in self.command)
        return Launch(argv=argv, env={**own.env, **self.env}, files=files)


_CLAUDE_CODE = {
    "promptSuggestions": False,  # it would ask the policy for the user's next turn
    "settingSources": ["user"],  # the repository's settings must not change the agent
    "tools": ["Bash", "Read", "Edit", "Write", "Grep", "Glob", "Agent"],
    "strictMcpConfig": True,
}

_ASK = b'{"permissions": {"defaultMode": "default"}}'
"""Makes Claude Code ask the client for permission. By default it asks the policy."""

SERVERS = {
    server.agent: server
    for server in (
        AcpServer(
            "claude_code",
            ("claude-agent-acp",),
            lock="claude-agent-acp",
            env={"CLAUDE_CODE_EXECUTABLE": "/opt/claude-code/claude"},
            files={f"{HOME}/.claude/settings.json": _ASK},
            session_meta={"claudeCode": {"options": _CLAUDE_CODE}},
        ),
        AcpServer(
            "codex",
            ("codex-acp",),
            lock="codex-acp",
            env={
                "CODEX_PATH": "/opt/codex/bin/codex",
                "INITIAL_AGENT_MODE": "agent-full-access",  # its own sandbox needs a namespace
                "NO_BROWSER": "1",
            },
            failure='"threadStatus": {"type": "systemError"',
            configures_mcp=True,  # a turn would not wait for servers of `session/new`
        ),
        AcpServer(
            "gemini_cli",
            (
                "/opt/node/bin/node",
                "/opt/gemini-cli/bundle/gemini.js",
                "--acp",
                *("--model", "{model}"),  # otherwise it asks the policy to choose one
            ),
        ),
        AcpServer("opencode", ("/opt/opencode/bin/opencode", "acp")),
    )
}
