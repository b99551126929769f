"""Applies the gold patch or runs the gold script. It must resolve every sound instance."""

from pathlib import Path
from typing import ClassVar

from perdure.agents import agent_options
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.errors import InstanceError
from perdure.sandboxes.base import ExecState, Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd

GOLD = f"{HOME}/gold.patch"
SOLUTION = f"{HOME}/solution"
SCRIPT = f"{SOLUTION}/solve.sh"
SOLVE = f"ln -sfn {SOLUTION} /solution 2>/dev/null; chmod +x {SCRIPT} && exec {SCRIPT}"
"""Harbor's scripts expect their folder at /solution."""


class Oracle:
    """The only agent that gets the solution."""

    name: ClassVar[str] = "oracle"
    needs_model: ClassVar[bool] = False
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        return ()

    def launch(self, task: AgentTask) -> Launch:
        """Raises: ConfigurationError on any option; InstanceError without a gold patch."""
        agent_options.parse(self.name, agent_options.NoOptions, task.options)
        script = task.instance.gold_script
        if "solve.sh" in script and not task.instance.gold_patch:
            files = {f"{SOLUTION}/{name}": data for name, data in script.items()}
            return Launch(argv=("bash", "-c", SOLVE), files=files)
        if not task.instance.gold_patch:
            raise InstanceError(f"{task.instance.ref} has no gold_patch for the oracle to apply")
        argv = ("git", "apply", "--whitespace=nowarn", GOLD)
        return Launch(argv=argv, files={GOLD: task.instance.gold_patch})

    def classify(self, evidence: Evidence) -> AgentEnd:
        status = evidence.status
        if status.state is ExecState.KILLED and status.cause == "timeout":
            return AgentEnd.LIMIT
        return AgentEnd.FINISHED if status.ok else AgentEnd.CRASHED
