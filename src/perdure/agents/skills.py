"""The skills of a task: folders with a `SKILL.md` each, which an agent may read when it needs them.

Each agent looks for skills in its own home. They are copied there from the task's image right before
the agent starts, as Harbor 0.26 does.
"""

from collections.abc import Iterable
from dataclasses import replace

from perdure import variant_registry
from perdure.agents.base import Agent, AgentTask, Launch, UsesSkills
from perdure.errors import ConfigurationError
from perdure.types import Instance

COPY = 'mkdir -p "$1" && cp -R "$2"/* "$1"; shift 2; exec "$@"'
"""If the image has no skills, the agent starts without them, as in Harbor, and its standard error has
the message of `cp`."""


def launch(agent: Agent, task: AgentTask) -> Launch:
    """The agent's launch, which first copies the task's skills. Raises: as `Agent.launch`."""
    own = agent.launch(task)
    skills = task.instance.skills_dir
    if not skills or not isinstance(agent, UsesSkills):
        return own
    copied = ("/bin/sh", "-c", COPY, "sh", agent.skills_folder, skills)
    return replace(own, argv=(*copied, *own.argv))


def check(name: str, agent: Agent, instance: Instance) -> None:
    """Raises: ConfigurationError if the task has skills and the agent calls a model but reads none."""
    if instance.skills_dir and agent.needs_model and not isinstance(agent, UsesSkills):
        raise ConfigurationError(
            f"{instance.ref} has skills in {instance.skills_dir}, but agent {name!r} reads none: "
            f"choose one of {', '.join(_reading())}"
        )


def _reading() -> Iterable[str]:
    for name in variant_registry.AGENTS:
        agent = variant_registry.load("agent", variant_registry.AGENTS, name)
        if isinstance(agent(), UsesSkills):
            yield name
