"""destroy_sandbox: on every path where the diff was not taken, leave nothing behind."""

from activities.messages import Attempt
from activities.services import Services
from activities.shell import shell


class DestroySandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("destroy_sandbox")
    async def destroy(self, attempt: Attempt) -> None:
        request = attempt.request
        provider = self.services.provider(request.sandbox)
        await provider.kill(self.services.agent_identity(request, attempt.attempt))
        await provider.kill(self.services.grade_identity(request, attempt.attempt))
