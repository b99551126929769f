"""How a rollout ended, on one line: `unresolved · 0.0 · 12 turns · 31k tokens`."""

from perdure.types import EpisodeRef, Failure, Outcome, RolloutStatus


def line(
    ending: str, *, reward: float | None, turns: int, tokens: int, failure: Failure | None = None
) -> str:
    parts = [ending]
    if reward is not None:
        parts.append(f"{reward:.1f}" if reward in (0, 1) else f"{reward:.2f}")
    if failure is not None:
        parts.append(f"{failure.boundary.value}: {failure.type}")
    if turns:
        parts.append(f"{turns} turn{'' if turns == 1 else 's'}")
    if tokens:
        parts.append(f"{short(tokens)} tokens")
    return " · ".join(parts)


def of_episode(episode: EpisodeRef) -> str:
    return line(
        episode.ending,
        reward=episode.reward,
        turns=episode.turns,
        tokens=episode.tokens,
        failure=episode.failure,
    )


def worst_first_key(episode: EpisodeRef) -> tuple[int, float]:
    """Sort key, worst first: no verdict, then outcomes other than (un)resolved, then low
    rewards."""
    if episode.status is not RolloutStatus.GRADED:
        return (0 if episode.status is RolloutStatus.FAILED else 1), 0.0
    honest = episode.outcome in (Outcome.RESOLVED, Outcome.UNRESOLVED)
    return (3 if honest else 2), episode.reward or 0.0


def short(count: int) -> str:
    """Example: `950`, `31k`, `1.2M`."""
    if count < 1000:
        return str(count)
    if count < 999_500:
        return f"{count / 1000:.0f}k"
    return f"{count / 1e6:.1f}M"
