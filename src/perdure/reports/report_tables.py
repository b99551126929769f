"""The tables of a report, the same for a terminal and for a page. Cells are plain text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perdure.reports.report_statistics import CONFIDENCE, INTERVAL_METHOD, NO_INTERVAL, Interval
from perdure.reports.run_comparison import Comparison
from perdure.reports.run_report import LISTED, Report, Spread

NONE = "-"
SIGNALS = 3
"""Most signals of a rollout in a table."""
SHOWN_K = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Section:
    """A table. The first column is text; the others are right-aligned unless `texts` is set."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    texts: bool = False


def sections(reports: Sequence[Report], comparisons: Sequence[Comparison]) -> list[Section]:
    """All tables with at least one row."""
    found = [_figures(reports), _endings(reports), _stages(reports)]
    found += [_comparison(one) for one in comparisons]
    for report in reports:
        of = f" of {report.run_id}" if len(reports) > 1 else ""
        found += [
            _named_rewards(report, of),
            _unverified(report, of),
            _signals(report, of),
            _failures(report, of),
            _slowest(report, of),
            _unsteady(report, of),
        ]
    return [section for section in found if section.rows]


def sweep(
    reports: Sequence[Report],
    values: Sequence[Mapping[str, str]],
    comparisons: Sequence[Comparison],
) -> Section:
    """One row for each run. `values`: by which each run differs from the others, in the same order.
    `comparisons`: each run compared with the first one."""
    changes = {one.second: _points(one.difference) for one in comparisons}
    ks = [k for k in SHOWN_K if k > 1 and any(k in one.pass_at_k for one in reports)][-1:]
    cells: dict[str, Callable[[Report], str]] = {
        "with a verdict": lambda one: f"{one.graded} of {one.planned}",
        "pass@1": _pass_at(1),
        **{f"pass@{k}": _pass_at(k) for k in ks},
        "against the first": lambda one: changes.get(one.run_id, NONE),
        "cost": _cost,
        "sampled tokens per rollout": lambda one: _big(one.sampled_tokens.mean),
        "seconds: median, p90, most": lambda one: _three(one.seconds),
    }
    filled = {name: [cell(one) for one in reports] for name, cell in cells.items()}
    kept = {name: column for name, column in filled.items() if set(column) != {NONE}}
    columns = [*zip(*(given.values() for given in values), strict=True), *kept.values()]
    rows = tuple(zip(*columns, strict=True))
    note = f"{CONFIDENCE:.0%} intervals: {INTERVAL_METHOD}; paired by instance"
    return Section("Sweep", (*values[0], *kept), rows, note)


def _figures(reports: Sequence[Report]) -> Section:
    ks = [k for k in SHOWN_K if any(k in one.pass_at_k for one in reports)]
    rows: list[tuple[str, Callable[[Report], str]]] = [
        ("name", lambda one: one.name or NONE),
        ("tags", lambda one: ", ".join(one.tags) or NONE),
        ("note", lambda one: one.note or NONE),
        ("agent", lambda one: ", ".join(one.agents)),
        ("model", lambda one: ", ".join(one.models) or "none was called"),
        ("model, as requested", lambda one: ", ".join(one.asked_models) or NONE),
        ("instances", lambda one: str(one.instances)),
        ("rollouts finished", lambda one: f"{one.rollouts} of {one.planned}"),
        ("stopped", lambda one: one.stopped or NONE),
        ("with a verdict", lambda one: f"{one.graded} of {one.planned}"),
        ("resolved", lambda one: f"{one.resolved}"),
        ("resolved, not checked by strong twins", lambda one: _count(sum(one.unverified.values()))),
        ("resolved, official verdict", _officially),
        ("exposed by twins", lambda one: _count(one.exposed)),
        ("patches with signals, resolved ones", _signaled),
        ("rewards withheld", lambda one: _count(one.withheld)),
        *((f"pass@{k}", _pass_at(k)) for k in ks),
        ("pass@1, without a verdict as 0, as 1", _verdict_bounds),
        ("verdicts of other programs, resolved ones", _adopted),
        ("pass@1 with these verdicts", _with_adopted),
        ("retried after a verdict", _played_again),
        ("upper bound (gold)", lambda one: _percent(one.bounds.upper)),
        ("upper bound (the base's own suite)", lambda one: _percent(one.bounds.base_suite)),
        ("lower bound (no patch)", lambda one: _percent(one.bounds.floor)),
        ("instances with known bounds", _bounds),
        ("mean reward", lambda one: _number(one.mean_reward)),
        ("graded without calibration", lambda one: str(one.not_calibrated)),
        ("turns: median, p90, most", lambda one: _three(one.turns)),
        ("prompt tokens, total", lambda one: _big(one.prompt_tokens.total)),
        ("cached prompt tokens", lambda one: _big(one.cached_tokens)),
        ("sampled tokens, total", lambda one: _big(one.sampled_tokens.total)),
        ("prompt tokens per rollout", lambda one: _big(one.prompt_tokens.mean)),
        ("sampled tokens per rollout", lambda one: _big(one.sampled_tokens.mean)),
        ("prompt tokens of discarded attempts", lambda one: _big(one.discarded_prompt_tokens)),
        ("sampled tokens of discarded attempts", lambda one: _big(one.discarded_sampled_tokens)),
        ("prompt tokens of judges", lambda one: _big(one.judge_prompt_tokens)),
        ("sampled tokens of judges", lambda one: _big(one.judge_sampled_tokens)),
        ("prompt tokens of simulated users", lambda one: _big(one.user_prompt_tokens)),
        ("sampled tokens of simulated users", lambda one: _big(one.user_sampled_tokens)),
        ("cost, total", _cost),
        ("cost per rollout: mean, p90", _cost_each),
        ("seconds: median, p90, most", lambda one: _three(one.seconds)),
        ("wall-clock time", lambda one: _clock(one.wall_seconds)),
        (
            "seconds outside model calls, per second inside",
            lambda one: _ratio(one.environment_to_model),
        ),
        ("sandboxes lost", _lost),
    ]
    filled = [(name, *(cell(one) for one in reports)) for name, cell in rows]
    kept = tuple(row for row in filled if any(cell != NONE for cell in row[1:]))
    note = f"{CONFIDENCE:.0%} intervals: {INTERVAL_METHOD}; pass@k by Chen et al. 2021"
    return Section("Figures", ("", *(one.run_id for one in reports)), kept, note)


def _endings(reports: Sequence[Report]) -> Section:
    names = dict.fromkeys(name for one in reports for name in one.outcomes)
    rows = tuple(
        (name, *(f"{(n := one.outcomes.get(name, 0))} ({n / one.rollouts:.1%})" for one in reports))
        for name in names
    )
    ends = dict.fromkeys(name for one in reports for name in one.agent_ends)
    more = tuple(
        (f"agent {name}", *(str(one.agent_ends.get(name, 0)) for one in reports)) for name in ends
    )
    return Section("Outcomes", ("", *(one.run_id for one in reports)), rows + more)


def _stages(reports: Sequence[Report]) -> Section:
    rows = tuple(
        (f"{stage} of {one.run_id}" if len(reports) > 1 else stage, *_four(spread))
        for one in reports
        for stage, spread in one.stage_seconds.items()
    )
    return Section("Seconds by stage", ("", "mean", "median", "p90", "most"), rows)


def _named_rewards(report: Report, of: str) -> Section:
    rows = tuple(
        (
            name,
            str(one.rollouts),
            *map(_number, (one.mean, one.least, one.most)),
            f"{one.groups_that_differ} of {one.groups}" if one.groups else NONE,
            _number(one.group_deviation if one.groups else None),
        )
        for name, one in report.named_rewards.items()
    )
    columns = ("", "rollouts", "mean", "least", "most", "groups that differ", "group deviation")
    return Section(f"Named rewards{of}", columns, rows)


def _unverified(report: Report, of: str) -> Section:
    rows = tuple((why, str(count)) for why, count in list(report.unverified.items())[:LISTED])
    return Section(f"Resolved, not checked{of}", ("why", "count"), rows)


def _signals(report: Report, of: str) -> Section:
    shown = list(report.signals.items())[:LISTED]
    rows = tuple((name, _some(signals, SIGNALS)) for name, signals in shown)
    more = len(report.signals) - LISTED
    note = f"--json lists {more} more rollouts" if more > 0 else ""
    return Section(f"Signals in patches{of}", ("rollout", "signals"), rows, note, texts=True)


def _failures(report: Report, of: str) -> Section:
    rows = tuple(
        (one.boundary, str(one.count), one.sentence, ", ".join(one.examples))
        for one in report.failures[:LISTED]
    )
    more = len(report.failures) - LISTED
    note = f"--json lists {more} more messages" if more > 0 else ""
    columns = ("boundary", "count", "message", "examples")
    return Section(f"Failures{of}", columns, rows, note, texts=True)


def _slowest(report: Report, of: str) -> Section:
    rows = tuple(
        (one.name, f"{one.seconds:.1f}", one.stage or NONE, one.ending) for one in report.slowest
    )
    columns = ("rollout", "seconds", "longest stage", "outcome")
    return Section(f"Slowest{of}", columns, rows, texts=True)


def _unsteady(report: Report, of: str) -> Section:
    rows: list[tuple[str, ...]] = []
    if report.flaky:
        rows.append(("same patch, different verdicts", str(len(report.flaky)), _some(report.flaky)))
    if report.mixed:
        rows.append(("resolved in only some samples", str(len(report.mixed)), _some(report.mixed)))
    if report.unreadable:
        rows.append(("unreadable episodes", str(len(report.unreadable)), _some(report.unreadable)))
    return Section(f"Inconsistent{of}", ("", "count", "which"), tuple(rows), texts=True)


def _comparison(one: Comparison) -> Section:
    change = one.difference
    rows = (
        ("instances in both", str(one.instances)),
        ("change in the resolved share", _points(change)),
        ("instances won, lost", f"{one.won}, {one.lost}"),
        ("p (exact sign test)", f"{one.p:.4f}"),
        ("won", _some(one.won_examples) or NONE),
        ("lost", _some(one.lost_examples) or NONE),
        ("only in the first, second run", f"{one.only_in_first}, {one.only_in_second}"),
    )
    note = "paired by instance; with one sample per instance, this is McNemar's exact test"
    return Section(f"{one.second} compared with {one.first}", ("", ""), rows, note)


def _pass_at(k: int) -> Callable[[Report], str]:
    def cell(report: Report) -> str:
        found = report.pass_at_k.get(k, NO_INTERVAL)
        partial = 0 < found.instances < report.planned_instances
        of = f", {found.instances} of {report.planned_instances} instances" if partial else ""
        return f"{_share(found)}{of}"

    return cell


def _verdict_bounds(report: Report) -> str:
    if report.verdict_bounds is None:
        return NONE
    return f"{_low_high(report.verdict_bounds)} ({report.planned - report.graded} without)"


def _low_high(bounds: tuple[float, float]) -> str:
    return f"{100 * bounds[0]:.1f} %, {100 * bounds[1]:.1f} %"


def _adopted(report: Report) -> str:
    if report.adopted is None:
        return NONE
    named = ", ".join(f"{origin}: {n}" for origin, n in report.adopted.verdicts.items())
    return f"{named}, {report.adopted.resolved}"


def _with_adopted(report: Report) -> str:
    if report.adopted is None:
        return NONE
    rest = (
        f"; the rest as 0, as 1: {_low_high(report.adopted.bounds)}"
        if report.adopted.bounds
        else ""
    )
    return f"{_share(report.adopted.share)}{rest}"


def _count(number: int) -> str:
    return str(number) if number else NONE


def _signaled(report: Report) -> str:
    return f"{len(report.signals)}, {report.resolved_with_signals}" if report.signals else NONE


def _officially(report: Report) -> str:
    """The official count, shown only if it differs from the resolved count."""
    differs = report.officially_resolved != report.resolved
    return str(report.officially_resolved) if differs else NONE


def _share(one: Interval) -> str:
    """`41.2 % (38.0 to 44.5)`."""
    if not one.instances:
        return NONE
    return f"{100 * one.mean:.1f} % ({100 * one.low:.1f} to {100 * one.high:.1f})"


def _points(one: Interval) -> str:
    if not one.instances:
        return NONE
    return f"{100 * one.mean:+.1f} points ({100 * one.low:+.1f} to {100 * one.high:+.1f})"


def _bounds(report: Report) -> str:
    bounds = report.bounds
    return f"{bounds.instances} ({bounds.source})" if bounds.instances else NONE


def _lost(report: Report) -> str:
    if not report.sandboxes:
        return NONE
    rate = report.sandbox_error_rate
    return f"{report.sandboxes_lost} of {report.sandboxes} ({rate:.2%})"


def _cost_each(report: Report) -> str:
    return f"${report.cost.mean:,.4f}, ${report.cost.p90:,.4f}" if report.cost else NONE


def _cost(report: Report) -> str:
    if report.unpriced:
        return f"no price for {', '.join(report.unpriced)}"
    unknown = f"unknown for {report.cost_unknown} of {report.rollouts} rollouts"
    if not report.cost:
        return unknown if report.cost_unknown else NONE
    partial = f"; {unknown}" if report.cost_unknown else ""
    return f"${report.cost.total:,.2f}{partial}"


def _played_again(report: Report) -> str:
    """The count of retried rollouts, with pass@1 by first verdicts."""
    if not report.played_again:
        return NONE
    return f"{report.played_again}; pass@1 by first verdicts {_share(report.first_share)}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _three(one: Spread) -> str:
    return (
        NONE
        if math.isnan(one.mean) or not one.most
        else f"{one.median:,.0f}, {one.p90:,.0f}, {one.most:,.0f}"
    )


def _four(one: Spread) -> tuple[str, ...]:
    return tuple(f"{value:,.1f}" for value in (one.mean, one.median, one.p90, one.most))


def _big(value: float) -> str:
    """`1.2 M`."""
    if math.isnan(value) or not value:
        return NONE
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def _some(names: Sequence[str], most: int = LISTED) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
