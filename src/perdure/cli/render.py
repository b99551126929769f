"""How runs and rollouts look: one-liners, tables, the live view. Owns no data and no connection."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.cli.console import many
from perdure.client.api import RolloutInfo, RunProgress
from perdure.types import EpisodeRef, RolloutStatus

OUTCOME_STYLES = {
    "resolved": "green",
    "unresolved": "yellow",
    "empty_patch": "yellow",
    "apply_failed": "yellow",
    "timeout": "magenta",
    "tampered": "bold red",
    "failed": "bold red",
    "cancelled": "dim",
    "expired": "dim",
}
LIVE_ROWS = 12


@dataclass(frozen=True)
class View:
    """One look at a run. `rate`: rollouts finished a second since we look; 0 = none yet."""

    progress: RunProgress
    rollouts: Sequence[RolloutInfo]
    seconds: float
    rate: float = 0.0
    trouble: str = ""

    @property
    def mean_reward(self) -> float | None:
        return mean_reward(r.episode for r in self.rollouts if r.episode is not None)

    @property
    def eta_s(self) -> float | None:
        left = self.progress.total - self.progress.done
        return left / self.rate if self.rate and left else None


def mean_reward(episodes: Iterable[EpisodeRef]) -> float | None:
    """Over those that have a reward: a failed rollout never counts as 0."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def line(progress: RunProgress) -> str:
    """`try-1: 12 done, 4 running, 8 waiting of 24 · resolved 7, unresolved 5 (running)`."""
    waiting = max(progress.total - progress.done - progress.running, 0)
    counts = f"{progress.done} done, {progress.running} running"
    counts += f", {waiting} waiting" if waiting else ""
    counts += f" of {progress.total}" if progress.total else ""
    found = _counts(progress)
    attention = f": {progress.attention}" if progress.attention else ""
    return (
        f"{progress.run_id}: {counts}{f' · {found}' if found else ''} ({progress.state}{attention})"
    )


def _counts(progress: RunProgress) -> str:
    other = {k: n for k, n in progress.by_status.items() if k != RolloutStatus.GRADED}
    return ", ".join(f"{name} {n}" for name, n in {**progress.by_outcome, **other}.items())


def live(view: View) -> RenderableType:
    """The live view: a bar, the counts, what runs now and what just finished."""
    progress = view.progress
    head = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(progress.total, 1), completed=progress.done, width=30)
    head.add_row(bar, Text(line(progress)))
    facts = [f"{clock(view.seconds)} elapsed"]
    if view.mean_reward is not None:
        facts.append(f"mean reward {view.mean_reward:.3f}")
    if view.eta_s is not None:
        facts.append(f"about {clock(view.eta_s)} to go")
    parts: list[RenderableType] = [head, Text(" · ".join(facts), style="dim")]
    if view.trouble:
        parts.append(Text(view.trouble, style="yellow"))
    return Group(*parts, running(view.rollouts))


def running(rollouts: Sequence[RolloutInfo], rows: int = LIVE_ROWS) -> Table:
    """Open rollouts first, then the newest finished ones."""
    chosen = sorted(rollouts, key=lambda r: (r.execution != "Running", r.seconds))[:rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("instance", "#", "agent", "stage", "attempt", "seconds"):
        table.add_column(name, justify="right" if name in ("#", "attempt", "seconds") else "left")
    for one in chosen:
        stage = one.stage if one.execution == "Running" else one.outcome or one.execution.lower()
        table.add_row(
            one.instance.split("/", 1)[-1],
            str(one.sample_index),
            one.agent,
            Text(stage, style=OUTCOME_STYLES.get(stage, "")),
            str(one.attempt),
            f"{one.seconds:.1f}",
        )
    return table


def results(episodes: Sequence[EpisodeRef]) -> Table:
    """The final table: instance, sample, agent, outcome, reward, seconds, attempts, and a total."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    mean = mean_reward(episodes)
    resolved = sum(episode.outcome == "resolved" for episode in episodes)
    table.add_column("instance", footer=many(len(episodes), "rollout"))
    table.add_column("#", justify="right")
    table.add_column("agent")
    table.add_column("outcome", footer=f"{resolved} resolved")
    table.add_column("reward", justify="right", footer="-" if mean is None else f"{mean:.3f}")
    table.add_column("seconds", justify="right", footer=f"{sum(e.seconds for e in episodes):.1f}")
    table.add_column("attempts", justify="right")
    for one in episodes:
        outcome = one.outcome.value if one.outcome else one.status.value
        table.add_row(
            one.instance_id,
            str(one.sample_index),
            one.agent,
            Text(outcome, style=OUTCOME_STYLES.get(outcome, "")),
            "-" if one.reward is None else f"{one.reward:g}",
            f"{one.seconds:.1f}",
            str(one.attempts),
        )
    return table


def failures(episodes: Sequence[EpisodeRef]) -> list[str]:
    """One line for each rollout without a reward, saying why."""
    return [
        f"{e.instance_id} #{e.sample_index}: {e.failure.boundary.value}: {e.failure.message}"
        for e in episodes
        if e.failure is not None
    ]


def clock(seconds: float) -> str:
    """`75.3` -> `1:15`; `4000` -> `1:06:40`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
