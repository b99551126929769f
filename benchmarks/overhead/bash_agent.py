"""The smallest agent that calls a model, to separate Perdure's cost from a harness's cost.

mini-swe-agent in the sandbox imports its packages in every rollout; its own batch runner does so once.
This agent starts in about 15 ms. Its dotted path is `benchmarks.overhead.bash_agent:BashAgent`.
"""

import asyncio
import shutil
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from benchmarks import common_job
from perdure.agents import agent_options
from perdure.agents.base import AgentTask, Evidence, Launch
from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, Request

LOOP = Path(__file__).parent / "bash_loop.py"
TARGET = "/opt/bench"


class BashAgentOptions(Request):
    system: str = "You are a helpful assistant that can use a shell."
    """System message; empty: none."""
    submit_line: str = common_job.DONE
    """The agent ends after a command whose output begins with this line."""
    turn_limit: int = Field(0, ge=0)
    """The most model calls; 0: no limit."""


class BashAgent:
    name: ClassVar[str] = "bench_bash"
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        folder = tools / "bench"
        await asyncio.to_thread(_copy, folder)
        return (Mount(folder, TARGET),)

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError for a wrong option, or without a gateway."""
        chosen = agent_options.parse(self.name, BashAgentOptions, task.options)
        if task.gateway_url is None:
            raise ConfigurationError(f"{self.name} needs a gateway")
        port = task.gateway_url.rsplit(":", 1)[1]
        return Launch(
            argv=(common_job.PYTHON, "-I", "-S", f"{TARGET}/{LOOP.name}", port, chosen.submit_line),
            env={
                "BENCH_KEY": task.session_key,
                "BENCH_MODEL": task.model,
                "BENCH_SYSTEM": chosen.system,
                "BENCH_TURNS": str(chosen.turn_limit),
                "BENCH_PROMPT": task.instance.problem_statement,
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if evidence.turns == 0:
            return AgentEnd.NEVER_CALLED_MODEL
        return AgentEnd.FINISHED if evidence.status.ok else AgentEnd.CRASHED


def _copy(folder: Path) -> None:
    if (folder / LOOP.name).exists() and (folder / LOOP.name).read_bytes() == LOOP.read_bytes():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{LOOP.name}"
    shutil.copyfile(LOOP, partial)
    partial.rename(folder / LOOP.name)
