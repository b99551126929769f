"""mini-swe-agent 2.4.6 from PyPI, unmodified, run in the sandbox from a read-only mount.

It runs headless by its own command line, with its `LocalEnvironment` in the workdir. Perdure
captures the diff itself and does not use the agent's submission.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from perdure.agents import agent_options, prompt_template, tool_cache
from perdure.agents.base import EVIDENCE, HOME, AgentTask, Evidence, Launch
from perdure.errors import ConfigurationError
from perdure.sandboxes.base import ExecState, Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, Request

MOUNT = "/opt/mini-swe-agent"
CONFIG = f"{HOME}/mini-swe-agent.yaml"
KEY = "OPENAI_API_KEY"
TRAJECTORY = f"{EVIDENCE}/trajectory.json"
LOCK = Path(__file__).parent / "locks" / "mini_swe_agent.txt"
DIRECT = Path(__file__).parent / "in_sandbox" / "mini_swe_agent_direct.py"
"""Perdure's model class for `client: direct`, copied into mini-swe-agent's site-packages."""
PACKAGES = f"lib/python3.{sys.version_info.minor}/site-packages"
COMMAND_TIMEOUT_S = 60
"""Time limit of each shell command, as in the agent's own SWE-bench configuration."""

LIMITS = {"LimitsExceeded", "TimeExceeded", "ContextWindowExceededError"}
GAVE_UP = {"RepeatedFormatError"}
"""The model did not answer in the agent's format. That is the policy's failure, so it is graded."""


class MiniSweAgentOptions(Request):
    step_limit: int = Field(250, ge=0)
    """Limit on model calls; 0 = none. 250 is the agent's own setting for SWE-bench."""
    prompt_template: str | None = None
    """The prompt, with the placeholders of `perdure.agents.prompt_template`. None: the default for the task."""
    client: Literal["litellm", "direct"] = "litellm"
    """How it calls the model: through litellm, its own default, or with the same request through
    `requests`, which saves the import of litellm (1.5 CPU-seconds per rollout)."""
    extra_args: tuple[str, ...] = ()
    """More of the agent's own flags, e.g. ["-c", "environment.timeout=120"]."""


class MiniSweAgent:
    name: ClassVar[str] = "mini_swe_agent"
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = (TRAJECTORY,)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        recipe = "\n".join((tool_cache.own_python().identity, LOCK.read_text(), DIRECT.read_text()))
        folder = await tool_cache.built(tools, self.name, recipe, _build)
        return (Mount(source=folder, target=MOUNT),)

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, MiniSweAgentOptions, task.options)
        if task.gateway_url is None:
            raise ConfigurationError(f"{self.name} needs a gateway: start one with `perdure up`")
        # -I: a folder of the repository, or its PYTHONPATH, must not shadow the agent's imports.
        program = (f"{MOUNT}/bin/python", "-I", "-m", "minisweagent.run.mini")
        builtin = f"{MOUNT}/{PACKAGES}/minisweagent/config/mini.yaml"
        configs = ("-c", builtin, "-c", CONFIG)
        headless = ("--yolo", "--exit-immediately", "--agent-class", "default")
        return Launch(
            argv=(*program, *configs, *headless, "-o", TRAJECTORY, *chosen.extra_args),
            env=_environment(task),
            files={CONFIG: _yaml(_configuration(task, chosen))},
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if evidence.turns == 0:
            return AgentEnd.NEVER_CALLED_MODEL
        status = evidence.status
        if status.state is ExecState.KILLED:
            return AgentEnd.LIMIT if status.cause == "timeout" else AgentEnd.CRASHED
        exit_status = _exit_status(evidence.files.get(TRAJECTORY, b""))
        if exit_status == "Submitted":
            return AgentEnd.FINISHED
        if exit_status in LIMITS:
            return AgentEnd.LIMIT
        return AgentEnd.GAVE_UP if exit_status in GAVE_UP else AgentEnd.CRASHED


def _build(folder: Path) -> None:
    tool_cache.make_virtual_environment(folder, LOCK, tool_cache.own_python())
    shutil.copyfile(DIRECT, folder / PACKAGES / "perdure_direct.py")


def _configuration(task: AgentTask, chosen: MiniSweAgentOptions) -> dict[str, Any]:
    """Settings that override the agent's own mini.yaml. They contain no key, because the trajectory
    repeats them."""
    model: dict[str, Any] = {
        "model_name": f"openai/{task.model}",
        "model_kwargs": {
            "api_base": f"{task.gateway_url}/v1",
            "extra_headers": task.headers,
            "timeout": int(task.budget_s) + 1,  # the budget ends a slow turn, not the client
        },
    }
    if chosen.client == "direct":
        model |= {"model_class": "perdure_direct.DirectModel", "model_name": task.model}
    return {
        "run": {"task": prompt_template.render(chosen.prompt_template, task)},
        "agent": {"step_limit": chosen.step_limit, "cost_limit": 0.0},
        "environment": {"timeout": COMMAND_TIMEOUT_S, "env": {KEY: ""}},  # commands get no key
        "model": model,
    }


def _environment(task: AgentTask) -> dict[str, str]:
    return {
        KEY: task.session_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
    }


def _yaml(value: dict[str, Any]) -> bytes:
    """JSON with special characters escaped as in YAML, so a YAML parser reads the exact value."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^\x00-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", text).encode()


def _exit_status(trajectory: bytes) -> str:
    """The agent's own exit status; "" if hostile code wrote bytes that cannot be parsed."""
    try:
        status = json.loads(trajectory)["info"]["exit_status"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return status if isinstance(status, str) else ""
