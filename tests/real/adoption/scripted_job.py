"""Runs inside Harbor's own Python: an agent whose task says what it does, and its sandbox."""

# mypy: ignore-errors
# Harbor is importable only in its own environment.

import asyncio
from pathlib import Path

from bench_environment import BwrapEnvironment
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

FIX = "sed -i 's/return a - b/return a + b/' calc.py; "
DIFF = "git diff > /logs/artifacts/patch.diff"


class ScriptedAgent(BaseAgent):
    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        if "break" in instruction:
            raise ConnectionError("the API did not answer")
        await environment.exec(f"{FIX if 'fix' in instruction else ''}{DIFF}")
        if "wait" in instruction:
            await asyncio.sleep(600)


class Environment(BwrapEnvironment):
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """A mounted folder is there already."""
        if self._host_path(source_dir).resolve() != Path(target_dir).resolve():
            await super().download_dir(source_dir, target_dir)
