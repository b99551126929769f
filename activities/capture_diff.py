"""capture_diff: the shell of `perdure.rollouts.capture`."""

from activities.activity_context import ThisTry
from activities.shell import shell
from perdure.rollouts.capture import capture
from perdure.rollouts.job import Job
from perdure.rollouts.messages import Attempt, Captured
from perdure.rollouts.sandbox.kept_alive import kept_alive
from perdure.rollouts.services import Services


class CaptureDiff:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("capture_diff")
    async def capture(self, attempt: Attempt) -> Captured:
        async with kept_alive(self.services, attempt):
            return await capture(await Job.of(self.services, attempt, ThisTry()))
