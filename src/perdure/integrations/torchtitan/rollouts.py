"""Turns an episode into TorchTitan's `Rollout`, with its turns segment by segment.

TorchTitan packs turns that extend each other and starts a new sample where the prefix breaks. Turns in
the order of segments, not of time, therefore give one sample per segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout.types import Rollout, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.types import RolloutTurnID

from perdure.episodes.episode import Episode, EpisodeSegments
from perdure.episodes.recorded_messages import answer_of, conversations
from perdure.errors import ConfigurationError
from perdure.types import AgentEnd, FinishReason, Outcome, Turn


@dataclass(kw_only=True, slots=True)
class SampledTurn(RolloutTurn):  # type: ignore[misc]  # torchtitan has no types
    """A turn with the sampling parameters that the generator got."""

    sampling: dict[str, Any]
    """Fields of `TurnSampling`; empty if they are unknown."""


def rollout_of(
    found: EpisodeSegments, turns: Sequence[Turn], *, group_id: int, rollout_id: int
) -> Rollout:
    """A graded episode as an unscored `Rollout`; the last turn's `env_rewards` hold its grade.

    `turns`: all turns of the rollout, as recorded. Raises: ConfigurationError if the trainer's
    generator did not sample them.
    """
    known = {turn.index: turn for turn in turns}
    spoken = conversations(turns)
    order = [known[index] for segment in found.segments for index in segment.turns]
    taken = [
        _turn(turn, spoken[turn.index], RolloutTurnID(group_id, rollout_id, position))
        for position, turn in enumerate(order)
    ]
    rewards = found.episode.rewards
    own = {**rewards.model_dump(), "reward": found.episode.reward} if rewards else {}
    taken[-1].env_rewards = {**found.episode.named_rewards, **own}
    taken[0].metrics = facts(found.episode)
    return Rollout(
        group_id=group_id, rollout_id=rollout_id, turns=taken, status=_status(found.episode, order)
    )


def facts(episode: Episode) -> list[m.Metric]:
    """Metrics that the trainer logs per step, as means over rollouts."""
    working = episode.engine_seconds + episode.environment_seconds
    values = {
        "solved": float(episode.outcome is Outcome.RESOLVED),
        "segments": float(len(episode.segments)),
        "attempts": float(len(episode.attempts)),
        "engine_share": episode.engine_seconds / working if working else 0.0,
        "seconds": episode.seconds,
    }
    return [m.Metric(f"perdure/{name}", m.Mean(value)) for name, value in values.items()]


def _turn(turn: Turn, prompt: list[dict[str, Any]], identity: RolloutTurnID) -> SampledTurn:
    versions = [span.version for span in turn.versions]
    if not versions:
        raise ConfigurationError(
            f"turn {turn.index} was sampled by {turn.engine or 'an unknown engine'}, without a policy "
            "version: the trainer's generator must be the only engine of this home's gateways"
        )
    return SampledTurn(
        rollout_id=identity,
        prompt_token_ids=list(turn.prompt_ids),
        completion_token_ids=list(turn.completion_ids),
        completion_logprobs=list(turn.logprobs),
        min_policy_version=min(versions),
        max_policy_version=max(versions),
        prompt_messages=prompt,
        completion_message=answer_of(turn),
        sampling=turn.sampling.model_dump(mode="json") if turn.sampling else {},
    )


def _status(episode: Episode, turns: Sequence[Turn]) -> RolloutStatus:
    if turns[-1].finish_reason is FinishReason.LENGTH:
        return RolloutStatus.TRUNCATED_LENGTH
    if episode.agent_end is AgentEnd.LIMIT:
        return RolloutStatus.TRUNCATED_MAX_TURNS
    return RolloutStatus.ERROR if episode.agent_end is AgentEnd.CRASHED else RolloutStatus.COMPLETED
