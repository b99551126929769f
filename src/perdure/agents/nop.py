"""The agent that does nothing. It must leave every sound instance unresolved."""

from pathlib import Path
from typing import ClassVar

from perdure.agents import agent_options
from perdure.agents.base import AgentTask, Evidence, Launch
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd


class Nop:
    name: ClassVar[str] = "nop"
    grade_empty_patch: ClassVar[bool] = True
    needs_model: ClassVar[bool] = False
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        return ()

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError on any option."""
        agent_options.parse(self.name, agent_options.NoOptions, task.options)
        return Launch(argv=("true",))

    def classify(self, evidence: Evidence) -> AgentEnd:
        return AgentEnd.FINISHED if evidence.status.ok else AgentEnd.CRASHED
