"""Runs as text: progress on one line, reasons of failures, times. Does not import rich."""

import time
from collections.abc import Iterable, Sequence

from perdure.rollouts.run_record import RunChange
from perdure.types import EpisodeRef, RolloutStatus, RunStatus


def progress_line(progress: RunStatus) -> str:
    """`try-1: 12 done, 4 running, 8 waiting of 24 · resolved 7, unresolved 5 (running)`."""
    waiting = max(progress.total - progress.done - progress.running, 0)
    counts = f"{progress.done} done, {progress.running} running"
    counts += f", {waiting} waiting" if waiting else ""
    counts += f" of {progress.total}" if progress.total else ""
    found = _counts(progress)
    attention = f": {progress.attention}" if progress.attention else ""
    state = "stopped by its budget" if stopped(progress) else progress.state
    return f"{progress.run_id}: {counts}{f' · {found}' if found else ''} ({state}{attention})"


def stopped(progress: RunStatus) -> str:
    """A sentence if the budget ended the run, with the fix. Empty if every rollout has a verdict."""
    left = progress.by_status.get(RolloutStatus.CANCELLED.value, 0)
    if not progress.stopped or progress.state != "done" or not left:
        return ""
    return (
        f"Stopped by its budget: {progress.stopped}; {left} of {progress.total} rollouts have no"
        f" verdict. Repeat the command with a larger budget to run them"
    )


def change_line(change: RunChange) -> str:
    """`Changed   2026-07-01 22:31 by ada@head: n_samples: 2 -> 3`."""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(change.at))
    by = f" by {change.by}" if change.by else ""
    return f"Changed   {at}{by}: {', '.join(change.told)}"


def _counts(progress: RunStatus) -> str:
    other = {k: n for k, n in progress.by_status.items() if k != RolloutStatus.GRADED}
    return ", ".join(f"{name} {n}" for name, n in {**progress.by_outcome, **other}.items())


def failures(episodes: Sequence[EpisodeRef]) -> list[str]:
    """One line for each rollout without a reward, with the reason."""
    return [f"{e.instance_id} #{e.sample_index}: {why}" for e in episodes if (why := _no_reward(e))]


def _no_reward(episode: EpisodeRef) -> str:
    if episode.failure is not None:
        return f"{episode.failure.boundary.value}: {episode.failure.message}"
    return f"reward withheld: {episode.withheld}" if episode.withheld else ""


def differences(episodes: Sequence[EpisodeRef]) -> list[str]:
    """One line for each rollout whose official verdict differs from the twins' verdict."""
    return [
        f"{e.instance_id} #{e.sample_index}: officially {e.official.value}, but {e.outcome.value}"
        for e in episodes
        if e.official is not None and e.outcome is not None
    ]


def clock(seconds: float) -> str:
    """`75.3` -> `1:15`; `4000` -> `1:06:40`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def mean_reward(episodes: Iterable[EpisodeRef]) -> float | None:
    """The mean of all rewards. A failed rollout has none and does not count as 0."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
