"""Runs inside Harbor's own Python: Harbor's mini-swe-agent with a program that the sandbox already has."""

# mypy: ignore-errors
# Harbor is importable only in its own environment.

from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class BoundMiniSweAgent(MiniSweAgent):
    async def install(self, environment: BaseEnvironment) -> None:
        pass

    def get_version_command(self) -> str | None:
        return None

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        await super().run(instruction, environment, context)
        done = await environment.exec("cp patch.txt /logs/artifacts/patch.diff")
        if done.return_code != 0:
            raise RuntimeError(done.stderr or "no patch")
