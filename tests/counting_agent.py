"""An agent for tests that needs no model: fixes the toy instance, or not, and counts its starts.

Named by its dotted path, `tests.counting_agent:CountingAgent`.
"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from perdure.agents import agent_options
from perdure.agents.base import EVIDENCE, AgentTask, Evidence, Launch
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, Request

NAME = "tests.counting_agent:CountingAgent"
STARTS = f"{EVIDENCE}/starts.log"
WORK = {
    "right": "sed -i 's/return a - b/return a + b/' calc.py",
    "wrong": "sed -i 's/return a - b/return a * b/' calc.py",
    "fails": "exit 7",
}


class CountingOptions(Request):
    does: Literal["right", "wrong", "fails"] = "right"
    after_s: float = Field(0.0, ge=0, description="Seconds that it works.")
    mark: str = Field("", description="A mark in its command line, by which the host can find it.")


class CountingAgent:
    name: ClassVar[str] = NAME
    needs_model: ClassVar[bool] = False
    artifacts: ClassVar[tuple[str, ...]] = (STARTS,)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        return ()

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, CountingOptions, task.options)
        count = f"mkdir -p {EVIDENCE} && echo start >>{STARTS}"
        script = f"{count} && sleep {chosen.after_s:g} && {WORK[chosen.does]}"
        return Launch(argv=("bash", "-c", script, "agent", chosen.mark))

    def classify(self, evidence: Evidence) -> AgentEnd:
        return AgentEnd.FINISHED if evidence.status.ok else AgentEnd.CRASHED
