"""Draws the plots of a report with matplotlib, as SVG without scripts and links.

Data has fixed hues that are readable on light and dark pages. Text and axes have the page's own
color.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perdure.errors import MissingDependency
from perdure.installation import command_for_extra
from perdure.reports.rollout_facts import RolloutFacts, RunFacts
from perdure.reports.run_report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUES = ("#3b82c4", "#d9822b", "#4c9f70", "#a65fa3", "#c94f4f", "#7f7f7f")
INK = "#123456"
"""Placeholder for the page's own text color, replaced in the SVG."""
SIZE = (5.2, 3.0)
"""Inches."""
STAGES = ("boot", "agent", "grade")
TURNS = 100
"""The plot of tokens by turn omits later turns."""
POINTS = 2000
"""Most points of a line or a scatter plot."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "perdure",  # the same run gives the same file
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
}


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str


Runs = Sequence[tuple[RunFacts, Report]]


def plots(runs: Runs) -> list[Plot]:
    """The plots for which these runs have data. Raises: MissingDependency without matplotlib."""
    drawings: list[tuple[str, Callable[[Axes, Runs], bool]]] = [
        ("Resolved with k samples", _pass_curve),
        ("Reward", _rewards),
        ("Seconds per rollout", _seconds),
        ("Seconds by stage", _stages),
        ("Turns", _turns),
        ("Tokens by turn", _tokens_by_turn),
        ("Rollouts in flight", _timeline),
        ("Policy versions", _versions),
    ]
    found = ((title, _svg(draw, runs)) for title, draw in drawings)
    return [Plot(title, svg) for title, svg in found if svg]


def _svg(draw: "Callable[[Axes, Runs], bool]", runs: Runs) -> str:
    """The plot as SVG; empty if there is no data."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependency(f"matplotlib is missing: {command_for_extra('report')}") from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        if not draw(axes, runs):
            return ""
        if len(runs) > 1 and axes.get_legend_handles_labels()[0]:
            axes.legend()
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _inline(out.getvalue())


def _inline(document: str) -> str:
    """The `svg` element alone, for a page: without the XML header and the metadata."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return svg.replace(INK, "currentColor")


def _pass_curve(axes: "Axes", runs: Runs) -> bool:
    for hue, (run, report) in zip(_hues(), runs, strict=False):
        ks = list(report.pass_at_k)
        curve = [report.pass_at_k[k] for k in ks]
        means = [100 * one.mean for one in curve]
        low = [100 * (one.mean - one.low) for one in curve]
        high = [100 * (one.high - one.mean) for one in curve]
        axes.errorbar(ks, means, [low, high], marker="o", color=hue, label=run.run_id, capsize=3)
        if report.bounds.upper is not None:
            axes.axhline(100 * report.bounds.upper, color=hue, linestyle=":", linewidth=1)
        if report.bounds.floor is not None:
            axes.axhline(100 * report.bounds.floor, color=hue, linestyle="--", linewidth=1)
    axes.set(xlabel="k", ylabel="resolved, %", ylim=(-2, 102))
    axes.locator_params(axis="x", integer=True)
    return any(report.pass_at_k for _, report in runs)


def _rewards(axes: "Axes", runs: Runs) -> bool:
    return _histogram(axes, runs, lambda one: one.reward, "reward", bins=20, most=1.0)


def _seconds(axes: "Axes", runs: Runs) -> bool:
    return _histogram(axes, runs, lambda one: one.seconds, "seconds", bins=40)


def _turns(axes: "Axes", runs: Runs) -> bool:
    return _histogram(axes, runs, lambda one: one.turns or None, "turns", bins=40)


def _histogram(
    axes: "Axes",
    runs: Runs,
    value: Callable[[RolloutFacts], float | None],
    label: str,
    *,
    bins: int,
    most: float = 0.0,
) -> bool:
    values = [[v for one in run.rollouts if (v := value(one)) is not None] for run, _ in runs]
    everything = [v for one in values for v in one]
    if not everything:
        return False
    low, high = min(0.0, *everything), most or max(everything) or 1.0
    for hue, (run, _), found in zip(_hues(), runs, values, strict=False):
        axes.hist(found, bins=bins, range=(low, high), color=hue, alpha=0.6, label=run.run_id)
    axes.set(xlabel=label, ylabel="rollouts")
    return True


def _stages(axes: "Axes", runs: Runs) -> bool:
    boxes: list[list[float]] = []
    labels: list[str] = []
    colours: list[str] = []
    for hue, (run, _) in zip(_hues(), runs, strict=False):
        for stage in STAGES:
            found = [one.stage_seconds[stage] for one in run.rollouts if stage in one.stage_seconds]
            if found:
                boxes.append(found)
                labels.append(stage if len(runs) == 1 else f"{stage}\n{run.run_id[:14]}")
                colours.append(hue)
    if not boxes:
        return False
    drawn = axes.boxplot(boxes, tick_labels=labels, patch_artist=True, showfliers=False)
    for box, colour in zip(drawn["boxes"], colours, strict=True):
        box.set(facecolor=colour, alpha=0.6)
    axes.set(ylabel="seconds")
    return True


def _tokens_by_turn(axes: "Axes", runs: Runs) -> bool:
    drawn = False
    for hue, (run, _) in zip(_hues(), runs, strict=False):
        for which, line in ((0, "-"), (1, ":")):
            medians = _medians([one.turn_tokens for one in run.rollouts], which)
            if medians:
                name = ("prompt", "sampled")[which]
                label = name if len(runs) == 1 else f"{run.run_id} {name}"
                axes.plot(range(1, len(medians) + 1), medians, line, color=hue, label=label)
                drawn = True
    axes.set(xlabel="turn", ylabel="median tokens", yscale="symlog")
    if drawn and len(runs) == 1:
        axes.legend()
    return drawn


def _medians(rollouts: Sequence[Sequence[tuple[int, int]]], which: int) -> list[float]:
    medians = []
    for turn in range(min(TURNS, max(map(len, rollouts), default=0))):
        found = sorted(one[turn][which] for one in rollouts if len(one) > turn)
        medians.append(float(found[len(found) // 2]))
    return medians


def _timeline(axes: "Axes", runs: Runs) -> bool:
    """The number of open rollouts, by minutes after the run's first start."""
    drawn = False
    for hue, (run, _) in zip(_hues(), runs, strict=False):
        times, open_now = _in_flight(run.rollouts)
        if times:
            axes.step(times, open_now, where="post", color=hue, label=run.run_id)
            drawn = True
    axes.set(xlabel="minutes", ylabel="in flight", ylim=(0, None))
    return drawn


def _in_flight(rollouts: Sequence[RolloutFacts]) -> tuple[list[float], list[int]]:
    changes = [(one.started_at, 1) for one in rollouts] + [
        (one.finished_at, -1) for one in rollouts
    ]
    changes.sort()
    every = max(1, len(changes) // POINTS)
    times, counts, now = [], [], 0
    for number, (at, change) in enumerate(changes):
        now += change
        if number % every == 0 or number == len(changes) - 1:
            times.append((at - changes[0][0]) / 60)
            counts.append(now)
    return times, counts


def _versions(axes: "Axes", runs: Runs) -> bool:
    """The newest policy version of each rollout's tokens, by the time at which it finished."""
    drawn = False
    for hue, (run, _) in zip(_hues(), runs, strict=False):
        points = sorted(
            (one.finished_at, one.version_max)
            for one in run.rollouts
            if one.version_max is not None
        )
        points = points[:: max(1, len(points) // POINTS)]
        if points:
            first = points[0][0]
            axes.scatter(
                [(at - first) / 60 for at, _ in points],
                [version for _, version in points],
                s=8,
                color=hue,
                label=run.run_id,
            )
            drawn = True
    axes.set(xlabel="minutes", ylabel="policy version")
    axes.locator_params(axis="y", integer=True)
    return drawn


def _hues() -> Any:
    while True:
        yield from HUES
