"""Agents from PyPI that a program of Perdure starts in the sandbox, on the agent's own packages.

`RunnerAgent` is for those without a command line: their program `in_sandbox/<name>_run.py` reads a
JSON file of settings, and the prompt from standard input. Its last line is a JSON object, `perdure_end`.
"""

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import field_validator

from perdure.agents import agent_options, headless_cli, npm_packages, tool_cache
from perdure.agents.base import HOME, AgentTask, Evidence, Launch
from perdure.agents.headless_launch import headless_launch
from perdure.sandboxes.base import Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd

PROGRAMS = Path(__file__).parent / "in_sandbox"
KEY = "PERDURE_SESSION_KEY"
"""The variable that the program reads and removes, because commands would inherit it."""


async def install(
    tools: Path, agent: str, program: str, python: tool_cache.Python
) -> tuple[Mount, ...]:
    """A program of `in_sandbox/`, with the packages of `locks/<agent>.txt`."""
    lock, source = npm_packages.LOCKS / f"{agent}.txt", PROGRAMS / program

    def build(folder: Path) -> None:
        tool_cache.make_virtual_environment(folder, lock, python)
        shutil.copyfile(source, folder / program)

    recipe = "\n".join((python.identity, lock.read_text(), source.read_text()))
    folder = await tool_cache.built(tools, agent, recipe, build)
    return (Mount(source=folder, target=f"/opt/{agent}"), *python.mounts)


def command(agent: str, program: str) -> tuple[str, ...]:
    # -I: a folder of the repository, or its PYTHONPATH, must not shadow the agent's imports.
    return (f"/opt/{agent}/bin/python", "-I", f"/opt/{agent}/{program}")


class RunnerOptions(headless_cli.HeadlessOptions):
    @field_validator("extra_args")
    @classmethod
    def _refuse_flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        if flags:
            raise ValueError("must be empty, because this agent has no flags")
        return flags


Options = TypeVar("Options", bound=RunnerOptions)


class RunnerAgent(ABC, Generic[Options]):
    name: ClassVar[str]
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = ()
    options: type[Options]
    behavior: ClassVar[Mapping[str, str]]
    """Variables of the agent, which `extra_env` may override."""
    ends: ClassVar[Mapping[str, AgentEnd]]
    """The `status` of `perdure_end` -> how the agent ended. Any other status is a crash."""

    @abstractmethod
    def program_settings(
        self, gateway_url: str, task: AgentTask, chosen: Options
    ) -> dict[str, Any]:
        """Input of the program. It contains no key, because files are kept as evidence."""

    def python(self, settings: AgentSettings) -> tool_cache.Python:
        """The interpreter that it runs on. Raises: MissingDependency."""
        return tool_cache.own_python()

    def check_host(self, settings: AgentSettings) -> None:
        self.python(settings)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        python = await asyncio.to_thread(self.python, settings)
        return await install(tools, self.name, f"{self.name}_run.py", python)

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, self.options, task.options)
        gateway_url = headless_cli.gateway_of(self.name, task)
        fixed = {KEY: task.session_key, "HOME": HOME}
        env = headless_cli.environment(self.behavior, fixed, chosen.extra_env)
        file = f"{HOME}/{self.name}.json"
        argv = (*command(self.name, f"{self.name}_run.py"), file)
        settings = {file: self.program_settings(gateway_url, task, chosen)}
        return headless_launch(task, chosen, argv, env, settings)

    def classify(self, evidence: Evidence) -> AgentEnd:
        if (early := headless_cli.early_end(evidence)) is not None:
            return early
        told = headless_cli.events(evidence.stdout_tail)
        end = next((event for event in told if event.get("kind") == "perdure_end"), {})
        ended = self.ends.get(str(end.get("status")), AgentEnd.CRASHED)
        return ended if evidence.status.ok else AgentEnd.CRASHED
