"""OpenHands' software-agent SDK 1.58.0 from PyPI, unmodified, run headless in the sandbox.

`openhands_run.py` starts its default agent with its own tools and prompts. It needs a Python 3.12
or later of the host, which is mounted too.
"""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from perdure.agents import agent_options, headless_cli, mcp_config, tool_cache
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_launch import headless_launch
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer

MOUNT = "/opt/openhands"
SETTINGS = f"{HOME}/openhands.json"
KEY = "PERDURE_SESSION_KEY"
LOCK = Path(__file__).parent / "locks" / "openhands.txt"
RUNNER = Path(__file__).parent / "in_sandbox" / "openhands_run.py"
PYTHON = "PERDURE_AGENTS__OPENHANDS_PYTHON"
"""The setting that names the Python to use. Default: the first on this host from 3.12 on."""

LIMITS = {"MaxIterationsReached", "LLMContextWindowExceedError"}


class OpenhandsOptions(headless_cli.HeadlessOptions):
    max_steps: int = Field(250, ge=1)
    """Limit on the agent's steps."""


class Openhands:
    name: ClassVar[str] = "openhands"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        python = await asyncio.to_thread(
            tool_cache.find_python, "3.12", settings.openhands_python, PYTHON
        )
        recipe = "\n".join((python.identity, LOCK.read_text(), RUNNER.read_text()))
        folder = await tool_cache.built(tools, self.name, recipe, lambda to: _build(to, python))
        return (Mount(source=folder, target=MOUNT), *python.mounts)

    def check_host(self, settings: AgentSettings) -> None:
        tool_cache.find_python("3.12", settings.openhands_python, PYTHON)

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, OpenhandsOptions, task.options)
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
        log = list(headless_cli.events(evidence.stdout_tail))
        status = next((e.get("status") for e in log if e.get("kind") == "perdure_end"), None)
        failures = [e for e in log if e.get("kind") == "ConversationErrorEvent"]
        if failures and str(failures[0].get("code")) in LIMITS:
            return AgentEnd.LIMIT
        if status == "stuck":
            return AgentEnd.GAVE_UP
        finished = evidence.status.ok and status == "finished"
        return AgentEnd.FINISHED if finished else AgentEnd.CRASHED


BEHAVIOR: Mapping[str, str] = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices
    "ALLOW_SHORT_CONTEXT_WINDOWS": "true",  # otherwise it refuses windows below 16,384 tokens
    "LOG_LEVEL": "WARNING",
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "DO_NOT_TRACK": "1",
}


def _build(folder: Path, python: tool_cache.Python) -> None:
    tool_cache.make_virtual_environment(folder, LOCK, str(python.executable))
    shutil.copyfile(RUNNER, folder / RUNNER.name)


def _settings(gateway_url: str, task: AgentTask, chosen: OpenhandsOptions) -> dict[str, Any]:
    """Input of `openhands_run.py`. It contains no key, because files are kept as evidence."""
    return {
        "llm": {
            "model": f"openai/{task.model}",
            "base_url": f"{gateway_url}/v1",
            "extra_headers": task.headers,
            "usage_id": "agent",
            "timeout": int(task.budget_s) + 1,  # the budget ends a slow turn, not the client
            "max_input_tokens": chosen.window(task),
            "max_output_tokens": chosen.answer(task),
            "caching_prompt": False,
            "reasoning_effort": None,
            "input_cost_per_token": 0.0,  # otherwise it looks up the price and warns
            "output_cost_per_token": 0.0,
        },
        "mcp_servers": {
            name: _server(task, name, server) for name, server in task.mcp_servers.items()
        },
        "persistence_dir": f"{HOME}/conversations",
        "max_steps": chosen.max_steps,
    }


def _server(task: AgentTask, name: str, server: McpServer) -> dict[str, Any]:
    timeout = {"timeout": mcp_config.wait_s(server)}
    if server.type == "http":
        return {"transport": "http", "url": mcp_config.url(task, name), **timeout}
    return {"command": server.command, "args": server.args, "env": server.env, **timeout}
