"""boot_sandbox: the shell of `perdure.rollouts.boot`."""

from activities.activity_context import ThisTry
from activities.shell import shell
from perdure.rollouts.boot import boot
from perdure.rollouts.job import Job
from perdure.rollouts.messages import Attempt, Booted
from perdure.rollouts.services import Services


class BootSandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("boot_sandbox")
    async def boot(self, attempt: Attempt) -> Booted:
        return await boot(await Job.of(self.services, attempt, ThisTry()))
