"""Compares recorded and recomputed logprobs by the figures that RL uses.

The importance ratio of a token is exp(its logprob by the trainer - the recorded one). KL(engine ||
trainer) is estimated by k3 = ratio - 1 - log ratio, which is unbiased for tokens that the engine
sampled and never negative (J. Schulman, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html). Greedy tokens are not sampled, so they have no KL.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.parity.scorer_process import Scored
from perdure.types import Turn


@dataclass(frozen=True)
class Difference:
    """The first id of a greedy turn that transformers would not have chosen."""

    turn: int
    position: int
    behind: float
    """Difference between its logit and the highest one, according to transformers."""


@dataclass(frozen=True)
class Figures:
    """One mode's turns, scored in one dtype."""

    mode: str
    scored_in: str
    turns: int
    tokens: int
    mean: float
    """Mean of |recorded - recomputed logprob|; p99 and max follow."""
    p99: float
    max: float
    ratio: tuple[float, float, float, float]
    """Importance ratios of tokens: min, 1st and 99th percentile, max."""
    turn_ratio: tuple[float, float]
    """Importance ratios of whole turns (product over the tokens): min, max."""
    k3: float | None
    spread: float
    """Standard deviation of the recorded logprobs, to compare the differences with."""
    differences: tuple[Difference, ...] | None
    """First differences of greedy turns; empty if all ids are equal."""


def figures(mode: str, dtype: str, turns: Sequence[Turn], scored: Sequence[Scored]) -> Figures:
    """Raises: ValueError unless each recorded id was scored once."""
    logs = [_log_ratios(turn, said) for turn, said in zip(turns, scored, strict=True)]
    tokens = sorted(log for turn in logs for log in turn)
    away = sorted(map(abs, tokens))
    ratios = [math.exp(log) for log in (tokens[0], *_ends(tokens), tokens[-1])]
    whole = sorted(math.exp(sum(turn)) for turn in logs)
    return Figures(
        mode=mode,
        scored_in=dtype,
        turns=len(turns),
        tokens=len(tokens),
        mean=statistics.fmean(away),
        p99=_ends(away)[1],
        max=away[-1],
        ratio=(ratios[0], ratios[1], ratios[2], ratios[3]),
        turn_ratio=(whole[0], whole[-1]),
        k3=None if mode == "greedy" else statistics.fmean(map(_k3, tokens)),
        spread=statistics.pstdev(value for turn in turns for value in turn.logprobs),
        differences=_differences(turns, scored) if mode == "greedy" else None,
    )


def _log_ratios(turn: Turn, scored: Scored) -> list[float]:
    pairs = zip(scored.logprobs, turn.logprobs, strict=True)
    return [trainer - recorded for trainer, recorded in pairs]


def _k3(log_ratio: float) -> float:
    return math.expm1(log_ratio) - log_ratio


def _ends(ordered: Sequence[float]) -> tuple[float, float]:
    """The 1st and the 99th percentile."""
    if len(ordered) == 1:
        return ordered[0], ordered[0]
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    return cuts[0], cuts[-1]


def _differences(turns: Sequence[Turn], scored: Sequence[Scored]) -> tuple[Difference, ...]:
    found = []
    for number, (turn, said) in enumerate(zip(turns, scored, strict=True)):
        pairs = zip(turn.completion_ids, said.likeliest, strict=True)
        first = next((at for at, (recorded, own) in enumerate(pairs) if recorded != own), None)
        if first is not None:
            found.append(Difference(number, first, said.behind[first]))
    return tuple(found)
