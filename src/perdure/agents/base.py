"""The agent contract: what to install, how to start it, how to classify its end.

An agent is the unmodified CLI or library from its registry. It runs in the sandbox, detached, under
the exec id `agent`. Starting it is idempotent, and a new watcher can re-attach to it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from pydantic import JsonValue

from perdure.sandboxes.base import ExecStatus, Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AGENT_HEADER, AgentEnd, Instance, McpServers, Sampling

EXEC_ID = "agent"
HOME = "/home/agent"
"""The agent's home in every sandbox, outside the repository, so its files are not in the diff."""
EVIDENCE = f"{HOME}/evidence"
"""Where an agent leaves its own logs and trajectory."""


@dataclass(frozen=True)
class AgentTask:
    """Everything an agent needs to start. Only the oracle may use `gold_patch`."""

    instance: Instance
    workdir: str
    gateway_url: str | None
    """Base URL without `/v1`, as seen from inside the sandbox."""
    session_key: str
    model: str
    sampling: Sampling
    budget_s: float
    mcp_servers: McpServers = field(default_factory=dict)
    """Servers whose tools the agent may call, for `UsesMcpServers`."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    has_user: bool = False
    """Whether a user may write further messages, for `TakesMessages`."""

    @property
    def headers(self) -> dict[str, str]:
        """The header that the agent must send with each model call, set where the commands that it
        runs do not inherit it. By this header the gateway tells its calls from theirs."""
        return {AGENT_HEADER: hashlib.sha256(self.session_key.encode()).hexdigest()[:16]}


@dataclass(frozen=True)
class Launch:
    """How to start the agent inside the sandbox. Files are written first."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    cwd: str | None = None


@dataclass(frozen=True)
class Evidence:
    """The output of a finished agent process. It is classified and stored, never trusted."""

    status: ExecStatus
    stdout_tail: bytes
    stderr_tail: bytes
    files: Mapping[str, bytes]
    """Contents of `Agent.artifacts` that existed."""
    turns: int
    """Model calls that the gateway recorded for this session."""


@runtime_checkable
class ChecksHost(Protocol):
    """An agent that needs a program which only a person can install. A run checks it first."""

    def check_host(self, settings: AgentSettings) -> None:
        """Raises: MissingDependency."""
        ...


@runtime_checkable
class InstallsChosen(Protocol):
    """An agent whose options name programs, which are installed in addition to its own."""

    async def install_chosen(
        self, tools: Path, settings: AgentSettings, options: Mapping[str, JsonValue]
    ) -> tuple[Mount, ...]:
        """Install what the options name. Otherwise like `Agent.install`."""
        ...


@runtime_checkable
class UsesMcpServers(Protocol):
    """An agent whose `launch` configures the task's MCP servers. Runs with servers refuse others."""

    uses_mcp_servers: ClassVar[bool]


@runtime_checkable
class UsesSkills(Protocol):
    """An agent that reads skills. A task with skills refuses other agents that call a model."""

    skills_folder: ClassVar[str]
    """Where it looks for them in the sandbox. They are there when it starts."""


@runtime_checkable
class TakesMessages(Protocol):
    """An agent that tells the host when its turn ends, and then waits for the user's next message, as
    `user_messages` describes. Runs with a user refuse others."""

    takes_messages: ClassVar[bool]


class Agent(Protocol):
    """One coding-agent harness."""

    name: ClassVar[str]
    needs_model: ClassVar[bool]
    """False for agents that never call the model (oracle, nop)."""
    artifacts: ClassVar[tuple[str, ...]]
    """Files inside the sandbox to keep as evidence."""

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        """Install the agent's program on this host, and return the mounts that it needs.

        `tools` is the host's tool cache; `settings` name programs for hosts without a registry.
        Many processes may call this at the same time.
        Raises: AgentError when the registry does not deliver the program; MissingDependency.
        """
        ...

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError naming an unknown or invalid option."""
        ...

    def classify(self, evidence: Evidence) -> AgentEnd:
        """How the agent ended, judged by the agent's own exit codes and log."""
        ...


async def install(
    agent: Agent, tools: Path, settings: AgentSettings, options: Mapping[str, JsonValue]
) -> tuple[Mount, ...]:
    """Install the agent with what its options name. Raises: as `Agent.install`."""
    mounts = await agent.install(tools, settings)
    if isinstance(agent, InstallsChosen):
        mounts += await agent.install_chosen(tools, settings, options)
    return mounts
