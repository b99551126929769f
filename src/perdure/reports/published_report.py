"""A run's score as it is published: `report.json`, and everything that identifies and reproduces it.

It is made from the store alone and has no time of its own, so a finished run always gives the same
bytes. It names no host, path, address or key (`redaction`).
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import JsonValue

from perdure.reports.redaction import public_image, redacted
from perdure.reports.report_statistics import CONFIDENCE, INTERVAL_METHOD
from perdure.reports.reproducing_command import reproducing_command
from perdure.reports.rollout_facts import RolloutFacts, RunFacts
from perdure.reports.run_report import Report
from perdure.types import Adopted, Frozen, Instance, Outcome, RolloutRequest, RunRequest

PER_ROLLOUT = {
    *("run_id", "instance", "sample_index", "group_id", "round", "start_at", "schema_version"),
    *("agent", "agent_options", "model", "models", "sampling", "policy_version", "grading"),
}
"""Fields of a rollout's request that are not settings of the run, or are elsewhere in the
report."""
OF_RUN = ("n_samples", "concurrency", "budget", "deadline_s", "stop_at", "quorum")
SHORT = 16
"""Hexadecimal digits of the digests of single rows, as the run's identity has them."""


class Estimate(Frozen):
    """A mean over `instances` and its confidence interval. Shares are from 0 to 1."""

    mean: float
    low: float
    high: float
    instances: int


class Score(Frozen):
    with_verdict: int
    planned: int
    """Rollouts."""
    resolved: int
    officially_resolved: int
    """By the rows' own protocols, regardless of twins."""
    planned_instances: int
    pass_at_k: dict[int, Estimate]
    """Over the instances with k verdicts. Rollouts without a verdict do not count."""
    pass_at_1_if_rest_unresolved: float | None = None
    pass_at_1_if_rest_resolved: float | None = None
    """Both are over all planned rollouts, and null if every rollout has a verdict."""
    interval: str = INTERVAL_METHOD
    confidence: float = CONFIDENCE
    upper_bound_gold: float | None = None
    upper_bound_base_suite: float | None = None
    lower_bound_no_patch: float | None = None


class AdoptedVerdicts(Frozen):
    """Verdicts of other programs, which `perdure adopt` kept. Perdure has not checked them, and
    `Score` leaves them out."""

    verdicts: dict[str, int]
    """Program -> rollouts."""
    resolved: int
    pass_at_1_with_them: Estimate
    pass_at_1_if_rest_unresolved: float | None = None
    pass_at_1_if_rest_resolved: float | None = None
    """Both are over all planned rollouts, and count the verdicts of all programs."""


class FailureCount(Frozen):
    """Rollouts without a verdict. Messages are left out: they may name hosts and paths."""

    boundary: str
    type: str
    rollouts: int


class Integrity(Frozen):
    """Counts of rollouts that a reader should know of."""

    exposed: int
    """A twin passed, so the results were forged."""
    tampered: int
    resolved_without_strong_twins: int
    with_signals: int
    withheld_rewards: int
    without_calibration: int
    retried_after_a_verdict: int


class Row(Frozen):
    instance: str
    sha256: str = ""
    """First digits of the digest of the row as the run started with it."""
    environment_sha256: str = ""
    image: str = ""
    """As the row names it; a private registry is left out."""


class Dataset(Frozen):
    names: tuple[str, ...]
    sha256: str
    """Digest of the sorted lines `<instance> <sha256>` of `rows`."""
    rows: tuple[Row, ...]


class AgentIdentity(Frozen):
    names: tuple[str, ...]
    versions: tuple[str, ...]
    packages_sha256: str = ""
    """First digits of the digest of its package locks."""
    options: dict[str, JsonValue]


class ModelIdentity(Frozen):
    answered: tuple[str, ...]
    requested: tuple[str, ...]
    reported: dict[str, JsonValue]
    """Model, root and tokenizer, as the endpoint and the settings named them at the start."""
    policy_version_min: int | None = None
    policy_version_max: int | None = None


class PublishedRollout(Frozen):
    instance: str
    sample_index: int
    status: str
    outcome: str | None
    official: str | None
    reward: float | None
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    patch_sha256: str
    adopted: Adopted | None = None
    """The other program that made the patch, and its verdict if that is kept."""


class PublishedReport(Frozen):
    """`report.json`."""

    schema_version: Literal[1] = 1
    run_id: str
    headline: str
    is_complete: bool
    """Whether each planned rollout has a verdict."""
    stopped: str
    """Why the run ended before all its rollouts; empty if it did not."""
    score: Score
    adopted: AdoptedVerdicts | None = None
    outcomes: dict[str, int]
    failures: tuple[FailureCount, ...]
    integrity: Integrity
    dataset: Dataset
    agent: AgentIdentity
    model: ModelIdentity
    sampling: dict[str, JsonValue]
    """With the seed; null: engines sample at random."""
    settings: dict[str, JsonValue]
    """Sandboxes, limits, caps, grading and retries of each rollout; samples and budgets of the run."""
    perdure_versions: tuple[str, ...]
    """Versions that wrote the episodes, with the commit if it was known."""
    cost_dollars: float | None
    command: str
    rollouts: tuple[PublishedRollout, ...]


def published(
    run: RunFacts,
    report: Report,
    request: RunRequest,
    identity: Mapping[str, str],
    rows: Mapping[str, Instance | None],
) -> PublishedReport:
    """`identity`: the run's, or `{}` if it has none. `rows`: the planned instances, by
    reference."""
    rollout = request.rollout_request("any/instance")
    score, adopted = _score(report), _adopted(report)
    return PublishedReport(
        run_id=run.run_id,
        headline=headline(score, adopted),
        is_complete=score.with_verdict == score.planned,
        stopped=report.stopped,
        score=score,
        adopted=adopted,
        outcomes=dict(sorted(report.outcomes.items())),
        failures=_failures(run),
        integrity=_integrity(report),
        dataset=_dataset(identity, rows),
        agent=AgentIdentity(
            names=report.agents,
            versions=_distinct([one.agent_version for one in run.rollouts]),
            packages_sha256=identity.get("agent.version", ""),
            options=redacted(rollout.agent_options),
        ),
        model=_model(run, report, identity),
        sampling=redacted(rollout.sampling.model_dump(mode="json")),
        settings=_settings(request, rollout),
        perdure_versions=_distinct([one.perdure_version for one in run.rollouts]),
        cost_dollars=report.cost.total if report.cost else None,
        command=reproducing_command(request, identity.get("engine.model", "")),
        rollouts=tuple(map(_line, run.rollouts)),
    )


def headline(score: Score, adopted: AdoptedVerdicts | None = None) -> str:
    """If a rollout has no verdict, the headline begins with "Incomplete". Verdicts of other
    programs have their own sentence."""
    if adopted is not None:
        return f"{headline(score)}. {_with_adopted(score, adopted)}"
    coverage = f"{score.with_verdict} of {score.planned} rollouts have a verdict"
    one = score.pass_at_k.get(1)
    if one is None:
        return f"Incomplete: {coverage}, so there is no score"
    interval = f"{CONFIDENCE:.0%} interval {100 * one.low:.1f} to {100 * one.high:.1f} %"
    found = f"pass@1 {100 * one.mean:.1f} % over {one.instances} instances ({interval})"
    low, high = score.pass_at_1_if_rest_unresolved, score.pass_at_1_if_rest_resolved
    if low is None or high is None:
        return f"{found}; {coverage}"
    rest = f"{100 * low:.1f} % if none of the rest resolves, {100 * high:.1f} % if all do"
    return f"Incomplete: {coverage}. Of these, {found}; over all, {rest}"


def _with_adopted(score: Score, adopted: AdoptedVerdicts) -> str:
    count = sum(adopted.verdicts.values())
    named = ", ".join(f"{n} of {origin}" for origin, n in adopted.verdicts.items())
    share = adopted.pass_at_1_with_them
    whole = f"{score.with_verdict + count} of {score.planned} rollouts"
    return (
        f"With verdicts that Perdure has not checked ({named}): pass@1 {100 * share.mean:.1f} % "
        f"over {share.instances} instances, {whole}"
    )


def _adopted(report: Report) -> AdoptedVerdicts | None:
    if report.adopted is None:
        return None
    low, high = report.adopted.bounds or (None, None)
    return AdoptedVerdicts(
        verdicts=report.adopted.verdicts,
        resolved=report.adopted.resolved,
        pass_at_1_with_them=Estimate(**report.adopted.share._asdict()),
        pass_at_1_if_rest_unresolved=low,
        pass_at_1_if_rest_resolved=high,
    )


def _score(report: Report) -> Score:
    low, high = report.verdict_bounds or (None, None)
    return Score(
        with_verdict=report.graded,
        planned=report.planned,
        resolved=report.resolved,
        officially_resolved=report.officially_resolved,
        planned_instances=report.planned_instances,
        pass_at_k={k: Estimate(**one._asdict()) for k, one in report.pass_at_k.items()},
        pass_at_1_if_rest_unresolved=low,
        pass_at_1_if_rest_resolved=high,
        upper_bound_gold=report.bounds.upper,
        upper_bound_base_suite=report.bounds.base_suite,
        lower_bound_no_patch=report.bounds.floor,
    )


def _failures(run: RunFacts) -> tuple[FailureCount, ...]:
    counts = Counter(
        (one.failure.boundary.value, one.failure.type) for one in run.rollouts if one.failure
    )
    return tuple(
        FailureCount(boundary=boundary, type=kind, rollouts=count)
        for (boundary, kind), count in sorted(counts.items())
    )


def _integrity(report: Report) -> Integrity:
    return Integrity(
        exposed=report.exposed,
        tampered=report.outcomes.get(Outcome.TAMPERED.value, 0),
        resolved_without_strong_twins=sum(report.unverified.values()),
        with_signals=len(report.signals),
        withheld_rewards=report.withheld,
        without_calibration=report.not_calibrated,
        retried_after_a_verdict=report.played_again,
    )


def _dataset(identity: Mapping[str, str], rows: Mapping[str, Instance | None]) -> Dataset:
    listed = tuple(
        _row(ref, identity.get(f"instance.{ref}", ""), rows[ref]) for ref in sorted(rows)
    )
    lines = "".join(f"{row.instance} {row.sha256}\n" for row in listed)
    return Dataset(
        names=_distinct([ref.split("/", 1)[0] for ref in rows]),
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
        rows=listed,
    )


def _row(ref: str, sha256: str, instance: Instance | None) -> Row:
    if instance is None:
        return Row(instance=ref, sha256=sha256)
    environments = "".join(one.model_dump_json() for one in instance.environments)
    return Row(
        instance=ref,
        sha256=sha256,
        environment_sha256=hashlib.sha256(environments.encode()).hexdigest()[:SHORT],
        image=public_image(instance.environment.image or ""),
    )


def _model(run: RunFacts, report: Report, identity: Mapping[str, str]) -> ModelIdentity:
    versions = [
        version
        for one in run.rollouts
        for version in (one.version_min, one.version_max)
        if version is not None
    ]
    reported = {name: value for name, value in identity.items() if name.startswith("engine.")}
    return ModelIdentity(
        answered=redacted(report.models),
        requested=redacted(report.asked_models),
        reported=redacted(reported),
        policy_version_min=min(versions, default=None),
        policy_version_max=max(versions, default=None),
    )


def _settings(request: RunRequest, rollout: RolloutRequest) -> dict[str, JsonValue]:
    of_rollout = rollout.model_dump(mode="json", exclude=PER_ROLLOUT)
    of_run = request.model_dump(mode="json", include=set(OF_RUN))
    found: dict[str, JsonValue] = redacted({**of_rollout, **of_run})
    return found


def _line(one: RolloutFacts) -> PublishedRollout:
    return PublishedRollout(
        instance=one.instance,
        sample_index=one.sample_index,
        status=one.status.value,
        outcome=one.outcome,
        official=one.official,
        reward=one.reward,
        turns=one.turns,
        prompt_tokens=one.prompt_tokens,
        sampled_tokens=one.sampled_tokens,
        patch_sha256=one.patch_sha256,
        adopted=one.adopted.model_copy(update=redacted(one.adopted.model_dump()))
        if one.adopted
        else None,
    )


def _distinct(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({value for value in values if value}))
