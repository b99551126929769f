"""An agent that is one command."""

from pathlib import Path
from typing import ClassVar

from perdure.agents.base import AgentTask, Evidence, Launch
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd


class CommandAgent:
    argv: ClassVar[tuple[str, ...]]
    needs_model: ClassVar[bool] = False
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[()]:
        return ()

    def launch(self, task: AgentTask) -> Launch:
        return Launch(argv=self.argv)

    def classify(self, evidence: Evidence) -> AgentEnd:
        return AgentEnd.FINISHED if evidence.status.ok else AgentEnd.CRASHED
