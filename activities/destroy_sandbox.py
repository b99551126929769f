"""destroy_sandbox: the shell of `perdure.rollouts.destroy`."""

from activities.activity_context import ThisTry
from activities.shell import shell
from perdure.rollouts.destroy import destroy
from perdure.rollouts.job import Job
from perdure.rollouts.messages import Attempt
from perdure.rollouts.services import Services


class DestroySandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("destroy_sandbox")
    async def destroy(self, attempt: Attempt) -> None:
        await destroy(await Job.of(self.services, attempt, ThisTry()))
