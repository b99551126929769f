"""The agent of a hostile rollout, by dotted path: `benchmarks.neighbour.hostile:HostileAgent`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from benchmarks import toy
from benchmarks.overhead.bash_agent import BashAgent
from perdure.agents import options
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Mount
from perdure.settings.tree import AgentSettings
from perdure.types import AgentEnd, Request

NAME = "benchmarks.neighbour.hostile:HostileAgent"
PROGRAM = Path(__file__).parent / "attacks.py"
INSIDE = f"{HOME}/{PROGRAM.name}"


class HostileOptions(Request):
    attack: str = Field("idle", description="A name of `attacks.ATTACKS`.")


class HostileAgent:
    name: ClassVar[str] = NAME
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        """The innocent agent's own tools: two rollouts of one agent share them."""
        return await BashAgent().install(tools, settings)

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError without a gateway."""
        chosen = options.parse(self.name, HostileOptions, task.options)
        if task.gateway_url is None:
            raise ConfigurationError(f"{self.name} needs a gateway")
        port = task.gateway_url.rsplit(":", 1)[1]
        return Launch(
            argv=(toy.PYTHON, "-I", INSIDE, chosen.attack, port),
            env={"BENCH_KEY": task.session_key, "BENCH_MODEL": task.model},
            files={INSIDE: PROGRAM.read_bytes()},
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        return AgentEnd.FINISHED if evidence.status.ok else AgentEnd.CRASHED
