"""The agent name for patches made elsewhere. It has no program: the agent stage applies the patch."""

from typing import ClassVar

from perdure.agents import agent_options
from perdure.agents.base import AgentTask, Launch
from perdure.agents.nop import Nop
from perdure.types import GIVEN_PATCHES, Request


class Options(Request):
    predictions_sha256: str = ""


class Predictions(Nop):
    name: ClassVar[str] = GIVEN_PATCHES
    grade_empty_patch: ClassVar[bool] = False

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError on an unknown option."""
        agent_options.parse(self.name, Options, task.options)
        return Launch(argv=("true",))
