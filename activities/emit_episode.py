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
        episode = await emit_episode(self.services.store, ending, self._turns_again)
        await forget_sessions(self.services, ending, episode)
        return episode

    async def _turns_again(self, session_id: str) -> None:
        """The gateway is asked only where turns are lost: its settings may be wrong."""
        await self.services.gateway.write_turns(session_id)
