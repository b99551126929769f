"""Any Agent Client Protocol server, started by its command and driven by the published client.

The client is `agent-client-protocol` 0.12.1 from PyPI, in `acp_client.py`. Its exit code says how the
last turn ended.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from perdure.agents import (
    agent_options,
    headless_cli,
    mcp_config,
    npm_install,
    npm_packages,
    prompt_template,
    python_runner,
    tool_cache,
    user_messages,
)
from perdure.agents.acp_servers import PACKAGES, SERVERS
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_cli import PROMPT, Arguments
from perdure.agents.in_sandbox import acp_client
from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer

NODE = "/opt/node"
SETTINGS = f"{HOME}/acp.json"
CLIENT = "acp_client.py"
ENDS: Mapping[int | None, AgentEnd] = {
    acp_client.FINISHED: AgentEnd.FINISHED,
    acp_client.LIMIT: AgentEnd.LIMIT,
    acp_client.GAVE_UP: AgentEnd.GAVE_UP,
}


class AcpOptions(headless_cli.HeadlessOptions):
    server: Literal["", "claude_code", "codex", "gemini_cli", "opencode"] = ""
    """One of Perdure's agents, with its program and settings, started as a server."""
    package: str = ""
    """npm package of the server with an exact version, `name@1.2.3`."""
    command: Arguments = Field((), validate_default=True)
    """The server's command: a program of `package`, of the image, or a path."""
    permissions: Literal["allow", "reject"] = "allow"
    """The answer to every permission request: for that request only, if the server offers this."""
    turn_s: float | None = Field(None, gt=0)
    """Seconds after which a turn is cancelled and the next one is sent; default: no limit."""

    @field_validator("package")
    @classmethod
    def _exact(cls, package: str) -> str:
        if package and not npm_install.EXACT.fullmatch(package):
            raise ValueError("name an npm package with an exact version, such as name@1.2.3")
        return package

    @field_validator("command")
    @classmethod
    def _known(cls, command: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not command and not info.data.get("server"):
            raise ValueError(
                'name the server\'s command, such as ["goose", "acp"], or set server to one of '
                + ", ".join(SERVERS)
            )
        return command


class Acp:
    name: ClassVar[str] = "acp"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    takes_messages: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        node = await npm_packages.installed(tools, "node", settings.node_tarball)
        client = await python_runner.install(tools, self.name, CLIENT, tool_cache.own_python())
        return (*client, Mount(source=node, target=NODE))

    async def install_chosen(
        self, tools: Path, settings: AgentSettings, options: Mapping[str, JsonValue]
    ) -> tuple[Mount, ...]:
        chosen = agent_options.parse(self.name, AcpOptions, options)
        server = SERVERS.get(chosen.server)
        mounts = await server.install(tools, settings, chosen.package) if server else ()
        mounts = tuple(mount for mount in mounts if mount.target != NODE)  # `install` has it
        if not chosen.package:
            return mounts
        folder = await npm_install.installed(tools, settings, chosen.package)
        return (*mounts, Mount(source=folder, target=PACKAGES))

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, AcpOptions, task.options)
        _refuse_hanging_servers(task, chosen)
        server = _server(task, chosen)
        program = (*python_runner.command(self.name, CLIENT), SETTINGS)
        return Launch(
            argv=headless_cli.with_prompt(program),
            env=server.env,
            files={
                **server.files,
                PROMPT: prompt_template.render(chosen.prompt_template, task).encode(),
                SETTINGS: json.dumps(_settings(task, chosen, server.argv)).encode(),
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        return ENDS.get(evidence.status.code, AgentEnd.CRASHED)


def _server(task: AgentTask, chosen: AcpOptions) -> Launch:
    """The server's command, with variables and files for the model."""
    gateway_url = headless_cli.gateway_of(Acp.name, task)
    limits = {"context_window", "max_output_tokens"} & chosen.model_fields_set
    if server := SERVERS.get(chosen.server):
        shared = limits | ({"extra_env"} & chosen.model_fields_set)
        return server.launch(task, chosen.model_dump(include=shared))
    if limits:
        raise ConfigurationError(
            f"agent_options.{min(limits)} needs agent_options.server: remove it, and set the limit "
            "in the server's own settings"
        )
    env = headless_cli.environment({}, _connection(gateway_url, task), chosen.extra_env)
    return Launch(argv=(), env=env)


def _connection(gateway_url: str, task: AgentTask) -> dict[str, str]:
    """The variables that the three vendors' own clients read. A command may rename them."""
    return {
        "HOME": HOME,
        "OPENAI_BASE_URL": f"{gateway_url}/v1",
        "OPENAI_API_KEY": task.session_key,
        "OPENAI_MODEL": task.model,
        "ANTHROPIC_BASE_URL": gateway_url,
        "ANTHROPIC_API_KEY": task.session_key,
        "ANTHROPIC_MODEL": task.model,
        "GOOGLE_GEMINI_BASE_URL": gateway_url,
        "GEMINI_API_KEY": task.session_key,
        "GEMINI_MODEL": task.model,
    }


def _settings(task: AgentTask, chosen: AcpOptions, command: tuple[str, ...]) -> dict[str, Any]:
    """Input of `acp_client.py`. This file is not kept as evidence."""
    server = SERVERS.get(chosen.server)
    servers = {} if server and server.configures_mcp else task.mcp_servers
    return {
        "command": [*(chosen.command or command), *chosen.extra_args],
        "packages": PACKAGES,
        "node": f"{NODE}/bin/node",
        "session_meta": server.session_meta if server else {},
        "failure": server.failure if server else "",
        "mcp_servers": [_mcp_server(task, *one) for one in servers.items()],
        "conversation": user_messages.FOLDER if task.has_user else "",
        "said_characters": user_messages.SAID_CHARACTERS,
        "permissions": chosen.permissions,
        "turn_s": chosen.turn_s,
    }


def _refuse_hanging_servers(task: AgentTask, chosen: AcpOptions) -> None:
    """Raises: ConfigurationError."""
    for name, server in task.mcp_servers.items():
        if chosen.server == "opencode" and not server.has_address:
            raise ConfigurationError(
                f"MCP server {name!r}: as an Agent Client Protocol server, opencode hangs with servers "
                "on stdio; use agent opencode, or serve it over HTTP"
            )


def _mcp_server(task: AgentTask, name: str, server: McpServer) -> dict[str, Any]:
    """A server as `session/new` takes it."""
    if at := mcp_config.address(task, name, key=task.session_key):
        headers = [{"name": header, "value": value} for header, value in at.headers.items()]
        return {"type": at.transport, "name": name, "url": at.url, "headers": headers}
    env = [{"name": variable, "value": value} for variable, value in server.env.items()]
    return {"name": name, "command": server.command, "args": server.args, "env": env}
