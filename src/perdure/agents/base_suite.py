"""The agent that does nothing, graded by the base's own tests: the upper bound of rows that a whole
test suite grades."""

from typing import ClassVar

from perdure.agents.base import AgentTask, Launch
from perdure.agents.nop import Nop
from perdure.errors import InstanceError

BY_SUITE = "eval_cmd"
"""The protocol whose verdict is the exit code of one command."""


class BaseSuite(Nop):
    name: ClassVar[str] = "base_suite"
    hidden_tests: ClassVar[bool] = False
    """The grader leaves out the row's hidden tests."""

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError on any option; InstanceError for a row with test lists."""
        if task.instance.grading.protocol != BY_SUITE:
            raise InstanceError(
                f"{task.instance.ref}: base_suite is for rows that the exit code of a suite grades;"
                " for others, `perdure instances calibrate` measures the bounds"
            )
        return super().launch(task)
