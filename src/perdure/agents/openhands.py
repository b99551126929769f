"""OpenHands' software-agent SDK 1.58.0 from PyPI, unmodified, run headless in the sandbox.

`openhands_run.py` starts its default agent with its own tools and prompts. It needs a Python 3.12
or later of the host, which is mounted too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from perdure.agents import mcp_config, tool_cache
from perdure.agents.base import HOME, AgentTask
from perdure.agents.python_runner import RunnerAgent, RunnerOptions
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, McpServer


class OpenhandsOptions(RunnerOptions):
    max_steps: int = Field(250, ge=1)
    """Limit on the agent's steps."""


class Openhands(RunnerAgent[OpenhandsOptions]):
    name: ClassVar[str] = "openhands"
    uses_mcp_servers: ClassVar[bool] = True
    options = OpenhandsOptions
    behavior: ClassVar[Mapping[str, str]] = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices
        "ALLOW_SHORT_CONTEXT_WINDOWS": "true",  # otherwise it refuses windows below 16,384 tokens
        "LOG_LEVEL": "WARNING",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "DO_NOT_TRACK": "1",
    }
    ends: ClassVar[Mapping[str, AgentEnd]] = {
        "finished": AgentEnd.FINISHED,
        "stuck": AgentEnd.GAVE_UP,
        "MaxIterationsReached": AgentEnd.LIMIT,
        "LLMContextWindowExceedError": AgentEnd.LIMIT,
    }

    def python(self, settings: AgentSettings) -> tool_cache.Python:
        named, variable = settings.openhands_python, "PERDURE_AGENTS__OPENHANDS_PYTHON"
        return tool_cache.find_python("3.12", named, variable)

    def program_settings(
        self, gateway_url: str, task: AgentTask, chosen: OpenhandsOptions
    ) -> dict[str, Any]:
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
    if server.is_behind_gateway:  # the program in the sandbox adds the key
        return {"transport": "http", "url": mcp_config.gateway_url(task, name), **timeout}
    if server.has_address:
        own = {"transport": server.type, "url": server.url, "headers": server.headers}
        return {**own, **timeout}
    return {"command": server.command, "args": server.args, "env": server.env, **timeout}
