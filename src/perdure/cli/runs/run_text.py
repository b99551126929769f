"""Runs as text: progress on one line, reasons of failures, times. Does not import rich."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perdure.rollouts.run_label import RunLabel
from perdure.rollouts.run_record import RunChange
from perdure.types import MISSING, EpisodeRef, RolloutStatus, RunStatus

UNFINISHED_LINES = 20
ENDED = ("done", "cancelled", "failed", "terminated")
"""States of runs whose workflow is closed."""


def progress_line(progress: RunStatus) -> str:
    """`try-1: 12 done, 4 running, 8 waiting of 24 · resolved 7, unresolved 5 (running)`."""
    rest = max(progress.total - progress.done - progress.running, 0)
    has_ended = progress.state in ENDED
    counts = f"{progress.done} done"
    counts += "" if has_ended and not progress.running else f", {progress.running} running"
    counts += f", {rest} {'unfinished' if has_ended else 'waiting'}" if rest else ""
    counts += f" of {progress.total}" if progress.total else ""
    found = _counts(progress)
    attention = f": {progress.attention}" if progress.attention else ""
    state = f"stopped by its {progress.stopped_by}" if stopped(progress) else progress.state
    return f"{progress.run_id}: {counts}{f' · {found}' if found else ''} ({state}{attention})"


def listed_line(progress: RunStatus, began: float | None, model: str, label: RunLabel) -> str:
    """`2026-07-01 22:31  try-1: 24 done of 24 · resolved 7 (done) · qwen3 · Baseline [paper]`.
    `began`: Unix seconds."""
    at = _minute(began) if began is not None else ""
    line = f"{at:<18}{progress_line(progress)}".strip()
    return " · ".join(part for part in (line, model, label.heading) if part)


UNFINISHED = (RolloutStatus.CANCELLED.value, RolloutStatus.TRUNCATED.value, MISSING, "running")
"""States of rollouts that have no verdict when a run ends."""
CONTINUE_HINTS = {
    "budget": "Repeat the command with a larger budget to run them",
    "deadline": "Repeat the command to continue them",
    "stop_at": "Repeat the command with --stop-at 100% to continue them",
}


def stopped(progress: RunStatus) -> str:
    """A sentence if its budget, deadline or `stop_at` ended the run, with the fix. Empty if every
    rollout has a verdict."""
    left = sum(progress.by_status.get(state, 0) for state in UNFINISHED)
    by = progress.stopped_by
    if not progress.stopped or by is None or progress.state != "done":
        return ""
    if not left and progress.total:
        return ""
    return (
        f"Stopped by its {by}: {progress.stopped}; {left} of {progress.total} rollouts have no"
        f" verdict. {CONTINUE_HINTS[by]}"
    )


def time_left(progress: RunStatus) -> str:
    """`ends in 1:15:00`; empty for a run without a deadline and for one that has ended."""
    if progress.ends_at is None or progress.state in ENDED:
        return ""
    return f"ends in {clock(max(0.0, progress.ends_at - time.time()))}"


def change_line(change: RunChange) -> str:
    """`Changed   2026-07-01 22:31 by ada@head: n_samples: 2 -> 3`."""
    by = f" by {change.by}" if change.by else ""
    return f"Changed   {_minute(change.at)}{by}: {', '.join(change.told)}"


def _minute(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _counts(progress: RunStatus) -> str:
    other = {k: n for k, n in progress.by_status.items() if k != RolloutStatus.GRADED}
    return ", ".join(f"{name} {n}" for name, n in {**progress.by_outcome, **other}.items())


def failures(episodes: Sequence[EpisodeRef]) -> list[str]:
    """One line for each rollout without a reward, with the reason."""
    return [f"{e.instance_id} #{e.sample_index}: {why}" for e in episodes if (why := _no_reward(e))]


def reasons(episodes: Sequence[EpisodeRef]) -> list[str]:
    """One line for each reason for which rollouts have no reward: `a-1 #0 and 3 more: ...`."""
    alike: dict[tuple[str, ...], list[EpisodeRef]] = {}
    for one in sorted(episodes, key=lambda one: (one.instance_id, one.sample_index)):
        if _no_reward(one):
            likeness = one.failure.likeness if one.failure is not None else (one.withheld,)
            alike.setdefault(likeness, []).append(one)
    return [_shared_reason(*found) for found in alike.values()]


def _shared_reason(first: EpisodeRef, *others: EpisodeRef) -> str:
    more = f" and {len(others)} more" if others else ""
    return f"{first.instance_id} #{first.sample_index}{more}: {_no_reward(first)}"


def _no_reward(episode: EpisodeRef) -> str:
    if episode.status is RolloutStatus.TRUNCATED:  # `unfinished_lines` has it
        return ""
    if episode.failure is not None:
        return f"{episode.failure.boundary.value}: {episode.failure.message}"
    return f"reward withheld: {episode.withheld}" if episode.withheld else ""


def unfinished_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each of the first rollouts that the run ended without. Rollouts that had begun
    come first. Example: `click-8.1.3 #0: agent: the run's deadline stopped its agent after 12
    turns`."""
    begun_first = sorted(rows, key=lambda row: not row["stage"])
    lines = [
        f"{row['instance'].split('/', 1)[1]} #{row['sample_index']}: "
        f"{row['stage'] and row['stage'] + ': '}{row['cause']}"
        for row in begun_first[:UNFINISHED_LINES]
    ]
    more = len(rows) - UNFINISHED_LINES
    return [*lines, f"{more} more: manifest.json lists them"] if more > 0 else lines


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
