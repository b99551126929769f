"""Rich tables of runs: the live view, the rollouts of a run, the results."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.cli.console import many
from perdure.cli.runs.run_text import clock, mean_reward, progress_line, time_left
from perdure.client.rollout_listing import RolloutInfo
from perdure.types import EpisodeRef, RolloutStatus, RunStatus

OUTCOME_STYLES = {
    "resolved": "green",
    "unresolved": "yellow",
    "empty_patch": "yellow",
    "apply_failed": "yellow",
    "timeout": "magenta",
    "tampered": "bold red",
    "unparsable": "bold red",
    "capture_failed": "bold red",
    "sandbox_destroyed": "bold red",
    "ungraded": "cyan",
    "adopted": "cyan",
    "failed": "bold red",
    "truncated": "magenta",
    "cancelled": "dim",
    "expired": "dim",
}
GOOD, BAD, HELD = "green", "red", "yellow"
"""Colors of the bar: all right; rollouts without a verdict; the run waits."""
GOING = ("starting", "running", "finishing", "done")
LIVE_ROWS = 12


@dataclass(frozen=True)
class View:
    """A snapshot of a run. `rate`: rollouts finished per second since the first one; 0 = none yet."""

    progress: RunStatus
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


def live(view: View) -> RenderableType:
    """A bar, the counts, the running rollouts and the newest finished ones."""
    progress = view.progress
    head = Table.grid(padding=(0, 1))
    style = bar_style(view)
    bar = ProgressBar(
        total=max(progress.total, 1),
        completed=progress.done,
        width=30,
        complete_style=style,
        finished_style=style,
    )
    head.add_row(bar, Text(progress_line(progress)))
    facts = [f"{clock(view.seconds)} elapsed"]
    if view.mean_reward is not None:
        facts.append(f"mean reward {view.mean_reward:.3f}")
    if left := time_left(progress):
        facts.append(left)
    if view.eta_s is not None:
        facts.append(f"about {clock(view.eta_s)} to go")
    parts: list[RenderableType] = [head, Text(" · ".join(facts), style="dim")]
    if view.trouble:
        parts.append(Text(view.trouble, style=HELD))
    return Group(*parts, running(view.rollouts))


def bar_style(view: View) -> str:
    """Red: a rollout failed. Yellow: the run waits for a person or a worker. Otherwise green."""
    if view.progress.by_status.get(RolloutStatus.FAILED):
        return BAD
    return GOOD if view.progress.state in GOING else HELD


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
    table.add_column("model")
    graded = sum(episode.status is RolloutStatus.GRADED for episode in episodes)
    of = f" of {graded} with a verdict" if graded < len(episodes) else ""
    table.add_column("outcome", footer=f"{resolved} resolved{of}")
    table.add_column("reward", justify="right", footer="-" if mean is None else f"{mean:.3f}")
    table.add_column("seconds", justify="right", footer=f"{sum(e.seconds for e in episodes):.1f}")
    table.add_column("attempts", justify="right")
    for one in episodes:
        outcome = one.ending
        table.add_row(
            one.instance_id,
            str(one.sample_index),
            one.agent,
            one.model or "-",
            Text(outcome, style=OUTCOME_STYLES.get(outcome, "")),
            "-" if one.reward is None else f"{one.reward:g}",
            f"{one.seconds:.1f}",
            str(one.attempts),
        )
    return table
