"""run_agent: the shell of `perdure.rollouts.agent`."""

from activities.activity_context import ThisTry
from activities.shell import shell
from perdure.rollouts.agent import run_agent
from perdure.rollouts.job import Job
from perdure.rollouts.messages import AgentRun, Attempt
from perdure.rollouts.sandbox.kept_alive import kept_alive
from perdure.rollouts.services import Services


class RunAgent:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("run_agent", leave_at_once=True)
    async def run(self, attempt: Attempt) -> AgentRun:
        async with kept_alive(self.services, attempt):
            return await run_agent(await Job.of(self.services, attempt, ThisTry()))
