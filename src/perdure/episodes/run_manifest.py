"""A run's manifest: totals over its episodes, and pass@k. Means cover graded rollouts only, and the
mean reward those with a reward."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from perdure.episodes.episode import Episode
from perdure.episodes.token_accounting import count
from perdure.types import Adopted, AgentEnd, Failure, Outcome, RolloutStatus, TokenCounts

NOT_CALIBRATED = "not_calibrated"


@dataclass(frozen=True, slots=True)
class Counted:
    """The facts of one episode that a manifest counts: about 2 KB instead of 17 or more."""

    instance: str
    sample_index: int
    key: str
    agent: str
    status: RolloutStatus
    outcome: Outcome | None
    official: Outcome | None
    """The verdict of the row's own protocol, if twins changed it."""
    verification: str | None
    signals: tuple[str, ...]
    withheld: str
    """Why its reward is withheld; empty if it is not."""
    calibration: str | None
    """The calibration state of its row in that kind of sandbox; None: not graded."""
    reward: float | None
    named_rewards: Mapping[str, float]
    agent_end: AgentEnd | None
    failure: Failure | None
    adopted: Adopted | None
    stopped_in: str
    """For a truncated rollout: the stage in which it was stopped."""
    attempts: int
    trainable: bool
    turns: int
    models: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    other_tokens: Mapping[str, TokenCounts]
    trained_tokens: int
    discarded_prompt_tokens: int
    discarded_sampled_tokens: int
    played_again: bool
    """An earlier attempt also had a verdict."""
    seconds: float
    stage_seconds: Mapping[str, float]
    engine_seconds: float
    environment_seconds: float

    @property
    def tokens(self) -> TokenCounts:
        return TokenCounts(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            sampled_tokens=self.sampled_tokens,
        )


SAME = [  # fields that `Episode` has under the same name
    field.name
    for field in fields(Counted)
    if field.name
    not in {
        *("calibration", "attempts", "played_again"),
        *("discarded_prompt_tokens", "discarded_sampled_tokens"),
    }
]


def counted(episode: Episode) -> Counted:
    grade = episode.grade
    bought = [use for attempt in episode.attempts for use in attempt.bought]
    known = grade.calibration.value if grade and grade.calibration else NOT_CALIBRATED
    return Counted(
        **{name: getattr(episode, name) for name in SAME},
        calibration=known if grade else None,
        attempts=len(episode.attempts),
        discarded_prompt_tokens=sum(one.prompt_tokens for one in bought),
        discarded_sampled_tokens=sum(one.sampled_tokens for one in bought),
        played_again=any(
            one.outcome and one.attempt < len(episode.attempts) for one in episode.earlier
        ),
    )


def build_manifest(run_id: str, episodes: Sequence[Counted]) -> dict[str, Any]:
    """Totals of a run and the list of its episodes, as JSON."""
    graded = [episode for episode in episodes if episode.status is RolloutStatus.GRADED]
    rewards = [episode.reward for episode in graded if episode.reward is not None]
    stages: Counter[str] = Counter()
    for episode in episodes:
        stages.update(episode.stage_seconds)
    passed = pass_at(graded)
    return {
        "schema_version": 1,
        "run_id": run_id,
        "rollouts": len(episodes),
        "instances": len({episode.instance for episode in episodes}),
        "graded": len(graded),
        "resolved": sum(episode.outcome is Outcome.RESOLVED for episode in graded),
        "official_resolved": sum((e.official or e.outcome) is Outcome.RESOLVED for e in graded),
        "verification": count(e.verification for e in graded if e.verification),
        "with_signals": sum(bool(episode.signals) for episode in graded),
        "resolved_with_signals": sum(
            bool(e.signals) and e.outcome is Outcome.RESOLVED for e in graded
        ),
        "withheld_rewards": sum(bool(episode.withheld) for episode in graded),
        "calibration": count(e.calibration for e in graded if e.calibration),
        "mean_reward": _mean(rewards),
        "pass_at_1": passed.get("1"),
        "pass_at_k": passed,
        "by_status": count(episode.status.value for episode in episodes),
        "by_outcome": count(e.outcome.value for e in graded if e.outcome is not None),
        "by_agent_end": count(e.agent_end.value for e in episodes if e.agent_end is not None),
        "failures_by_boundary": count(e.failure.boundary.value for e in episodes if e.failure),
        "attempts": sum(episode.attempts for episode in episodes),
        "trainable": sum(episode.trainable for episode in episodes),
        "models": sorted({name for episode in episodes for name in episode.models}),
        "played_again": sum(episode.played_again for episode in graded),
        "discarded_prompt_tokens": sum(one.discarded_prompt_tokens for one in episodes),
        "discarded_sampled_tokens": sum(one.discarded_sampled_tokens for one in episodes),
        "turns": sum(episode.turns for episode in episodes),
        "prompt_tokens": sum(episode.prompt_tokens for episode in episodes),
        "sampled_tokens": sum(episode.sampled_tokens for episode in episodes),
        "trained_tokens": sum(episode.trained_tokens for episode in episodes),
        "rollout_seconds": round(math.fsum(episode.seconds for episode in episodes), 3),
        "stage_seconds": {name: round(seconds, 3) for name, seconds in sorted(stages.items())},
        "engine_seconds": round(math.fsum(episode.engine_seconds for episode in episodes), 3),
        "environment_seconds": round(math.fsum(e.environment_seconds for e in episodes), 3),
        "episodes": [_entry(episode) for episode in episodes],
    }


def _entry(episode: Counted) -> dict[str, Any]:
    return {
        "instance_id": episode.instance.split("/", 1)[1],
        "agent": episode.agent,
        "sample_index": episode.sample_index,
        "status": episode.status.value,
        "outcome": episode.outcome.value if episode.outcome else None,
        "reward": episode.reward,
        **({"named_rewards": episode.named_rewards} if episode.named_rewards else {}),
        "failure": episode.failure.model_dump(mode="json") if episode.failure else None,
        "sampled_tokens": episode.sampled_tokens,
        "seconds": episode.seconds,
        **({"adopted": episode.adopted.model_dump(mode="json")} if episode.adopted else {}),
        **({"official": episode.official.value} if episode.official else {}),
        **({"verification": episode.verification} if episode.verification else {}),
        **({"signals": episode.signals} if episode.signals else {}),
        **({"withheld": episode.withheld} if episode.withheld else {}),
        **({"calibration": episode.calibration} if episode.calibration else {}),
        "attempts": episode.attempts,
        "key": episode.key,
    }


def pass_at(episodes: Sequence[Episode | Counted]) -> dict[str, float]:
    """Unbiased pass@k (Chen et al. 2021) for each k, over the instances with at least k graded
    samples.

    Example:
        {"1": 0.5, "2": 0.8333, "3": 1.0, "4": 1.0} for one instance, 2 of its 4 samples resolved.
    """
    tries: defaultdict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        tries[episode.instance].append(episode.outcome is Outcome.RESOLVED)
    most = max((len(results) for results in tries.values()), default=0)
    found: dict[str, float] = {}
    for k in range(1, most + 1):
        chances = [
            1 - math.comb(results.count(False), k) / math.comb(len(results), k)
            for results in tries.values()
            if len(results) >= k
        ]
        found[str(k)] = round(math.fsum(chances) / len(chances), 4)
    return found


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 4) if values else None
