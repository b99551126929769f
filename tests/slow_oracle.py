"""An agent for tests: the oracle, after some seconds of work that can be interrupted."""

from dataclasses import replace
from typing import ClassVar

from perdure.agents.base import AgentTask, Launch
from perdure.agents.oracle import Oracle


class SlowOracle(Oracle):
    name: ClassVar[str] = "slow_oracle"

    def launch(self, task: AgentTask) -> Launch:
        launch = super().launch(task)
        return replace(launch, argv=("sh", "-c", 'sleep 4; exec "$@"', "sh", *launch.argv))
