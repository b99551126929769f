"""emit_episode: the shell of `perdure.rollouts.episode`."""

from activities.shell import shell
from perdure.rollouts.episode import emit_episode
from perdure.rollouts.gateway_session.forget import forget_sessions
from perdure.rollouts.messages import Ending
from perdure.rollouts.services import Services
from perdure.types import EpisodeRef


class EmitEpisode:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("emit_episode")
    async def emit(self, ending: Ending) -> EpisodeRef:
        episode = await emit_episode(self.services.store, ending)
        await forget_sessions(self.services, ending)
        return episode
