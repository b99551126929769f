"""A run's manifest: totals over its episodes, and pass@k. Means are over graded rollouts only."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from perdure.episodes.accounting import count
from perdure.episodes.episode import Episode
from perdure.types import Outcome

NOT_CALIBRATED = "not_calibrated"


def build_manifest(run_id: str, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Totals of a run and the list of its episodes, as JSON."""
    graded = [episode for episode in episodes if episode.reward is not None]
    stages: Counter[str] = Counter()
    for episode in episodes:
        stages.update(episode.stage_seconds)
    passed = pass_at(graded)
    return {
        "schema_version": 1,
        "run_id": run_id,
        "rollouts": len(episodes),
        "instances": len({episode.instance_id for episode in episodes}),
        "graded": len(graded),
        "resolved": sum(episode.outcome is Outcome.RESOLVED for episode in graded),
        "official_resolved": sum((e.official or e.outcome) is Outcome.RESOLVED for e in graded),
        "verification": count(
            e.grade.verification.state for e in graded if e.grade and e.grade.verification
        ),
        "calibration": count(_calibration(episode) for episode in graded),
        "mean_reward": _mean([episode.reward or 0.0 for episode in graded]),
        "pass_at_1": passed.get("1"),
        "pass_at_k": passed,
        "by_status": count(episode.status.value for episode in episodes),
        "by_outcome": count(e.outcome.value for e in graded if e.outcome is not None),
        "by_agent_end": count(e.agent_end.value for e in episodes if e.agent_end is not None),
        "failures_by_boundary": count(e.failure.boundary.value for e in episodes if e.failure),
        "attempts": sum(len(episode.attempts) for episode in episodes),
        "trainable": sum(episode.trainable for episode in episodes),
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


def counted(episode: Episode) -> Episode:
    """The episode without what a manifest leaves out: tests, segments, the tokens of each turn, the request."""
    grade = episode.grade and episode.grade.model_copy(
        update={"fail_to_pass": {}, "pass_to_pass": {}}
    )
    provenance = episode.provenance.model_copy(update={"request": {}})
    left_out = {"grade": grade, "provenance": provenance, "segments": (), "turn_tokens": ()}
    return episode.model_copy(update=left_out)


def _entry(episode: Episode) -> dict[str, Any]:
    fields = {"sample_index", "status", "outcome", "reward", "seconds", "sampled_tokens", "failure"}
    return {
        "instance_id": episode.instance_id,
        "agent": episode.agent,
        **episode.model_dump(mode="json", include=fields),
        **({"official": episode.official.value} if episode.official else {}),
        **({"calibration": _calibration(episode)} if episode.grade else {}),
        "attempts": len(episode.attempts),
        "key": episode.key,
    }


def _calibration(episode: Episode) -> str:
    """What was known of its row in the sandboxes that graded it."""
    state = episode.grade.calibration if episode.grade else None
    return state.value if state else NOT_CALIBRATED


def pass_at(episodes: Sequence[Episode]) -> dict[str, float]:
    """Unbiased pass@k (Chen et al. 2021) for every k, over the instances with at least k graded samples.

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
