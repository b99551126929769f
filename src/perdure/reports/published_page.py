"""`report.html`: the published report as one page."""

import json
from collections import defaultdict
from collections.abc import Iterator

from pydantic import BaseModel, JsonValue

from perdure.reports.published_report import Estimate, PublishedReport, PublishedRollout, Score
from perdure.reports.report_html import page
from perdure.reports.report_tables import NONE, SHOWN_K, Section
from perdure.reports.reproducing_command import dotted


def published_page(report: PublishedReport) -> str:
    names = (report.dataset.names, report.model.answered, report.agent.names)
    title = " · ".join(", ".join(one) for one in names if one)
    sections = [
        _score(report.score),
        _facts("Verdicts of other programs, not checked by Perdure", dict(_adopted(report))),
        _facts("Identity", dict(_identity(report))),
        Section("Command", ("",), ((report.command,),), texts=True),
        Section(
            "Failures by boundary",
            ("boundary", "type", "rollouts"),
            tuple((one.boundary, one.type, str(one.rollouts)) for one in report.failures),
            texts=True,
        ),
        _facts("Integrity: number of rollouts", _texts(report.integrity)),
        _facts("Sampling", {name: _text(one) for name, one in report.sampling.items()}),
        _facts("Settings and limits", _settings(report)),
        _instances(report),
    ]
    shown = [section for section in sections if section.rows]
    return page(title, shown, (), f"run {report.run_id}", headline=report.headline)


def _score(score: Score) -> Section:
    rows = [("rollouts with a verdict", f"{score.with_verdict} of {score.planned}")]
    rows += [("resolved", str(score.resolved))]
    rows += [("resolved, official verdict", str(score.officially_resolved))]
    curve = score.pass_at_k
    rows += [(f"pass@{k}", _estimate(curve[k], score)) for k in SHOWN_K if k in curve]
    shares = {
        "pass@1 if none of the rest resolves": score.pass_at_1_if_rest_unresolved,
        "pass@1 if all of the rest resolve": score.pass_at_1_if_rest_resolved,
        "upper bound (gold)": score.upper_bound_gold,
        "upper bound (the base's own suite)": score.upper_bound_base_suite,
        "lower bound (no patch)": score.lower_bound_no_patch,
    }
    rows += [(name, f"{100 * one:.1f} %") for name, one in shares.items() if one is not None]
    note = f"{score.confidence:.0%} intervals: {score.interval}"
    return Section("Score", ("", ""), tuple(rows), note, texts=True)


def _adopted(report: PublishedReport) -> Iterator[tuple[str, str]]:
    if (adopted := report.adopted) is None:
        return
    yield from ((origin, f"{count} rollouts") for origin, count in adopted.verdicts.items())
    yield "resolved", str(adopted.resolved)
    yield "pass@1 with them", _estimate(adopted.pass_at_1_with_them, report.score)


def _estimate(one: Estimate, score: Score) -> str:
    of = f"{one.instances} of {score.planned_instances} instances"
    return f"{100 * one.mean:.1f} % ({100 * one.low:.1f} to {100 * one.high:.1f}), {of}"


def _identity(report: PublishedReport) -> Iterator[tuple[str, str]]:
    yield "dataset", f"{', '.join(report.dataset.names)}: {len(report.dataset.rows)} rows"
    yield "sha256 of all rows", report.dataset.sha256
    yield "agent", " ".join((*report.agent.names, *report.agent.versions))
    yield "agent's package locks", report.agent.packages_sha256
    yield from (("agent option " + name, _text(one)) for name, one in report.agent.options.items())
    yield "models that answered", ", ".join(report.model.answered)
    yield "models, as requested", ", ".join(report.model.requested)
    yield from ((name, _text(one)) for name, one in report.model.reported.items())
    if report.model.policy_version_max is not None:
        versions = f"{report.model.policy_version_min} to {report.model.policy_version_max}"
        yield "policy versions", versions
    yield "Perdure", ", ".join(report.perdure_versions)
    yield "run ended early", report.stopped
    if report.cost_dollars is not None:
        yield "cost", f"${report.cost_dollars:,.2f}"


def _instances(report: PublishedReport) -> Section:
    samples: defaultdict[str, list[PublishedRollout]] = defaultdict(list)
    for one in report.rollouts:
        samples[one.instance].append(one)
    rows = tuple(
        (
            row.instance,
            ", ".join(one.outcome or one.status for one in samples[row.instance]) or "missing",
            row.sha256,
            row.environment_sha256,
            row.image or NONE,
        )
        for row in report.dataset.rows
    )
    columns = ("instance", "outcomes", "row", "environment", "image")
    return Section("Instances", columns, rows, "digests are the first 16 digits", texts=True)


def _facts(title: str, facts: dict[str, str]) -> Section:
    return Section(title, ("", ""), tuple((k, v) for k, v in facts.items() if v), texts=True)


def _texts(model: BaseModel) -> dict[str, str]:
    return {name.replace("_", " "): str(one) for name, one in model.model_dump().items()}


def _settings(report: PublishedReport) -> dict[str, str]:
    return {name: _text(one) for name, one in dotted(report.settings) if one is not None}


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)
