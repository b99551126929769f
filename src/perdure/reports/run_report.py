"""The figures of one run. `document` turns a report into JSON."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from perdure.reports.calibration_bounds import Bounds
from perdure.reports.failure_groups import FailureGroup, failure_groups
from perdure.reports.named_reward_statistics import NamedReward, named_reward_statistics
from perdure.reports.report_statistics import NO_INTERVAL, Interval, pass_curve, quantile
from perdure.reports.rollout_facts import RESOLVED, RolloutFacts, RunFacts
from perdure.reports.run_comparison import first_resolved_samples, resolved_samples
from perdure.reports.token_prices import Prices
from perdure.types import Outcome, RolloutStatus

SLOWEST = 10
LISTED = 20
"""Most entries in a list of a report."""


@dataclass(frozen=True)
class Spread:
    """The distribution of a figure over rollouts."""

    total: float
    mean: float
    median: float
    p90: float
    most: float


@dataclass(frozen=True)
class Slow:
    name: str
    """`<instance>/<sample>`."""
    seconds: float
    stage: str
    """Its longest stage."""
    ending: str


@dataclass(frozen=True)
class AdoptedScore:
    """The score if other programs' verdicts, which Perdure has not checked, count like its own."""

    verdicts: dict[str, int]
    """Program -> the rollouts whose verdict is its own."""
    resolved: int
    """Of these rollouts."""
    share: Interval
    """pass@1 over the verdicts of all programs."""
    bounds: tuple[float, float] | None
    """pass@1 if none and if all rollouts without any verdict were resolved; None if each has one."""


@dataclass(frozen=True)
class Report:
    """The figures of a run. Shares cover graded rollouts; failed ones do not count as 0."""

    run_id: str
    agents: tuple[str, ...]
    models: tuple[str, ...]
    """Models that answered."""
    asked_models: tuple[str, ...]
    """Requested model names under which no model answered."""
    stopped: str
    """Why the run ended before its rollouts: its budget, its deadline or `stop_at`."""
    truncated: int
    """Rollouts that the end of the run's time stopped."""
    verdict_bounds: tuple[float, float] | None
    """pass@1 if none and if all planned rollouts without a verdict were resolved; None if each has
    one."""
    adopted: "AdoptedScore | None"
    """None if the run keeps no other program's verdict."""
    instances: int
    planned_instances: int
    planned: int
    """Planned rollouts; the number of finished ones if the run has no plan."""
    rollouts: int
    """Finished rollouts, with or without a verdict."""
    graded: int
    resolved: int
    officially_resolved: int
    """Resolved by the rows' own protocols, regardless of twins."""
    unverified: dict[str, int]
    """Why no strong twin checked a success -> the number of such successes."""
    exposed: int
    """Rollouts whose results were forged: a twin passed."""
    withheld: int
    """Graded rollouts whose reward is withheld."""
    signals: dict[str, tuple[str, ...]]
    """Rollout -> the signals of its patch, successes first."""
    resolved_with_signals: int
    resolved_share: Interval
    """pass@1: the mean over instances of the resolved share of their samples."""
    pass_at_k: dict[int, Interval]
    played_again: int
    """Graded rollouts that were retried although they had a verdict."""
    first_share: Interval
    """pass@1 by the first verdict of each rollout."""
    discarded_prompt_tokens: int
    discarded_sampled_tokens: int
    """Tokens of attempts that no longer count, because they were lost or retried."""
    judge_prompt_tokens: int
    judge_sampled_tokens: int
    user_prompt_tokens: int
    user_sampled_tokens: int
    """Tokens of models that played the user."""
    mean_reward: float | None
    named_rewards: dict[str, NamedReward]
    bounds: Bounds
    outcomes: dict[str, int]
    """Number of rollouts by outcome, or by status if they have none."""
    agent_ends: dict[str, int]
    failures: tuple[FailureGroup, ...]
    not_calibrated: int
    turns: Spread
    prompt_tokens: Spread
    cached_tokens: int
    sampled_tokens: Spread
    cost: Spread | None
    """Dollars, with discarded attempts; None if a model has no price or no tokens are known."""
    cost_unknown: int
    """If prices were given: rollouts with unknown tokens, which `cost` omits."""
    unpriced: tuple[str, ...]
    """If prices were given: models without one."""
    seconds: Spread
    stage_seconds: dict[str, Spread]
    engine_seconds: float
    environment_seconds: float
    environment_to_model: float | None
    """Seconds of agents' stages outside model calls, per second inside them."""
    sandboxes: int
    sandboxes_lost: int
    slowest: tuple[Slow, ...]
    mixed: tuple[str, ...]
    """Instances with resolved and unresolved samples: `<instance> 2/4`."""
    flaky: tuple[str, ...]
    """Rollouts whose patch had different outcomes, and instances whose equal patches had."""
    wall_seconds: float
    """Seconds from the first start to the last end."""
    unreadable: tuple[str, ...]
    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def sandbox_error_rate(self) -> float:
        return self.sandboxes_lost / self.sandboxes if self.sandboxes else 0.0


def build_report(
    run: RunFacts,
    *,
    planned: Collection[tuple[str, int]] = (),
    bounds: Bounds | None = None,
    prices: Prices | None = None,
    stopped: str = "",
) -> Report:
    """`planned`: instance reference and sample of each planned rollout; empty if unknown."""
    rollouts = tuple(one for one in run.rollouts if not one.has_foreign_verdict)
    names = {*planned, *((one.instance, one.sample_index) for one in run.rollouts)}
    graded = [one for one in rollouts if one.graded]
    engine = math.fsum(one.engine_seconds for one in rollouts)
    environment = math.fsum(one.environment_seconds for one in rollouts)
    curve = pass_curve(resolved_samples(run))
    unpriced = tuple(prices.missing(rollouts)) if prices else ()
    costs = prices.costs(rollouts) if prices else []
    replayed = [one for one in graded if one.earlier_outcomes]
    discarded = [use for one in rollouts for use in one.discarded]
    judged = [use for one in rollouts for use in one.judged]
    users = [use for one in rollouts for use in one.user_usage]
    return Report(
        run_id=run.run_id,
        agents=_distinct(one.agent for one in rollouts),
        models=_distinct(name for one in rollouts for name in one.models),
        asked_models=_distinct(name for one in rollouts for name in one.asked_models),
        stopped=stopped,
        truncated=sum(one.truncated for one in rollouts),
        verdict_bounds=_verdict_bounds(graded, names),
        adopted=_adopted(run, names),
        instances=len({one.instance for one in run.rollouts}),
        planned_instances=len({instance for instance, _ in names}),
        planned=len(names),
        rollouts=len(run.rollouts),
        graded=len(graded),
        resolved=sum(one.resolved for one in graded),
        officially_resolved=sum(one.official == RESOLVED for one in graded),
        unverified=_counted(one.unverified for one in graded if one.unverified),
        exposed=sum(one.exposed for one in graded),
        withheld=sum(bool(one.withheld) for one in graded),
        signals={
            one.name: one.signals
            for one in sorted(graded, key=lambda one: not one.resolved)
            if one.signals
        },
        resolved_with_signals=sum(one.resolved and bool(one.signals) for one in graded),
        resolved_share=curve.get(1, NO_INTERVAL),
        pass_at_k=curve,
        played_again=len(replayed),
        first_share=pass_curve(first_resolved_samples(run)).get(1, NO_INTERVAL),
        discarded_prompt_tokens=sum(one.prompt_tokens for one in discarded),
        discarded_sampled_tokens=sum(one.sampled_tokens for one in discarded),
        judge_prompt_tokens=sum(one.prompt_tokens for one in judged),
        judge_sampled_tokens=sum(one.sampled_tokens for one in judged),
        user_prompt_tokens=sum(one.prompt_tokens for one in users),
        user_sampled_tokens=sum(one.sampled_tokens for one in users),
        mean_reward=_mean([one.reward for one in graded if one.reward is not None]),
        named_rewards=named_reward_statistics(graded),
        bounds=bounds or Bounds(),
        outcomes=_counted(one.ending for one in run.rollouts),
        agent_ends=_counted(one.agent_end for one in rollouts if one.agent_end),
        failures=tuple(failure_groups(rollouts)),
        not_calibrated=sum(one.calibration is None for one in graded),
        turns=_spread([one.turns for one in rollouts]),
        prompt_tokens=_spread([one.prompt_tokens for one in rollouts]),
        cached_tokens=sum(one.cached_tokens for one in rollouts),
        sampled_tokens=_spread([one.sampled_tokens for one in rollouts]),
        cost=_spread(costs) if costs and not unpriced else None,
        cost_unknown=len(rollouts) - len(costs) if prices else 0,
        unpriced=unpriced,
        seconds=_spread([one.seconds for one in rollouts]),
        stage_seconds=_stages(rollouts),
        engine_seconds=round(engine, 3),
        environment_seconds=round(environment, 3),
        environment_to_model=round(environment / engine, 4) if engine else None,
        sandboxes=sum(one.sandboxes for one in rollouts),
        sandboxes_lost=sum(one.sandboxes_lost for one in rollouts),
        slowest=tuple(_slow(one) for one in _longest(rollouts)),
        mixed=_mixed(run),
        flaky=_flaky(graded),
        wall_seconds=_wall(rollouts),
        unreadable=run.unreadable,
    )


def _adopted(run: RunFacts, names: Collection[tuple[str, int]]) -> AdoptedScore | None:
    kept = [one for one in run.rollouts if one.has_foreign_verdict]
    if not kept:
        return None
    judged = [one for one in run.rollouts if one.graded or one.has_foreign_verdict]
    counted = replace(run, rollouts=tuple(map(_by_any_program, judged)))
    return AdoptedScore(
        verdicts=_counted(one.adopted.origin for one in kept if one.adopted),
        resolved=sum(one.adopted.resolved for one in kept if one.adopted),
        share=pass_curve(resolved_samples(counted)).get(1, NO_INTERVAL),
        bounds=_verdict_bounds(counted.rollouts, names),
    )


def _by_any_program(one: RolloutFacts) -> RolloutFacts:
    """With the other program's verdict as its outcome."""
    if not one.has_foreign_verdict or one.adopted is None:
        return one
    outcome = RESOLVED if one.adopted.resolved else Outcome.UNRESOLVED.value
    return replace(one, status=RolloutStatus.GRADED, outcome=outcome)


def _verdict_bounds(
    graded: Sequence[RolloutFacts], names: Collection[tuple[str, int]]
) -> tuple[float, float] | None:
    if len(graded) == len(names):
        return None
    samples = Counter(instance for instance, _ in names)
    resolved = Counter(one.instance for one in graded if one.resolved)
    open_ones = samples - Counter(one.instance for one in graded)
    low = [resolved[name] / count for name, count in samples.items()]
    high = [(resolved[name] + open_ones[name]) / count for name, count in samples.items()]
    return math.fsum(low) / len(low), math.fsum(high) / len(high)


def _stages(rollouts: Sequence[RolloutFacts]) -> dict[str, Spread]:
    by_stage: defaultdict[str, list[float]] = defaultdict(list)
    for one in rollouts:
        for stage, seconds in one.stage_seconds.items():
            by_stage[stage].append(seconds)
    return {
        stage: _spread(by_stage[stage]) for stage in ("boot", "agent", "grade") if by_stage[stage]
    }


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    total = math.fsum(ordered)
    return Spread(
        total=round(total, 4),
        mean=round(total / len(ordered), 4) if ordered else math.nan,
        median=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        most=ordered[-1] if ordered else math.nan,
    )


def _longest(rollouts: Sequence[RolloutFacts]) -> Sequence[RolloutFacts]:
    return sorted(rollouts, key=lambda one: -one.seconds)[:SLOWEST]


def _slow(one: RolloutFacts) -> Slow:
    stage = max(one.stage_seconds, key=lambda name: one.stage_seconds[name], default="")
    return Slow(one.name, round(one.seconds, 1), stage, one.ending)


def _mixed(run: RunFacts) -> tuple[str, ...]:
    tries = resolved_samples(run).items()
    return tuple(f"{name} {sum(one)}/{len(one)}" for name, one in tries if 0 < sum(one) < len(one))


def _flaky(graded: Sequence[RolloutFacts]) -> tuple[str, ...]:
    outcomes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for one in graded:
        if one.patch_sha256:
            outcomes[one.instance_id, one.patch_sha256].add(one.ending)
    alike = (name for (name, _), found in outcomes.items() if len(found) > 1)
    return tuple(dict.fromkeys((*(one.name for one in graded if one.flaky), *alike)))


def _wall(rollouts: Sequence[RolloutFacts]) -> float:
    if not rollouts:
        return 0.0
    first = min(one.started_at for one in rollouts)
    return round(max(one.finished_at for one in rollouts) - first, 1)


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
