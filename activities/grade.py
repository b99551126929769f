"""grade_in_fresh_sandbox: the shell of `perdure.rollouts.grade`."""

from activities.activity_context import ThisTry
from activities.shell import shell
from perdure.rollouts.grade import grade
from perdure.rollouts.job import Job
from perdure.rollouts.messages import Attempt, GradedPatch
from perdure.rollouts.services import Services


class GradeInFreshSandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("grade_in_fresh_sandbox")
    async def grade(self, attempt: Attempt) -> GradedPatch:
        return await grade(await Job.of(self.services, attempt, ThisTry()))
