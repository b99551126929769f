"""The name under which patches from elsewhere are graded. It never runs: its rollouts start at the grading."""

from pathlib import Path
from typing import ClassVar

from perdure.agents import options
from perdure.agents.base import AgentTask, Evidence, Launch
from perdure.sandboxes.base import Mount
from perdure.settings.tree import AgentSettings
from perdure.types import GIVEN_PATCHES, AgentEnd


class Predictions:
    name: ClassVar[str] = GIVEN_PATCHES
    needs_model: ClassVar[bool] = False
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        return ()

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError on any option."""
        options.parse(self.name, options.NoOptions, task.options)
        return Launch(argv=("false",))

    def classify(self, evidence: Evidence) -> AgentEnd:
        return AgentEnd.FINISHED
