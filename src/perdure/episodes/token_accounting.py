"""Counts how every sampled token of a rollout was used, and how many tokens a trainer reads.

Owns the counts of `episode.json` about the trajectory.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pydantic import Field

from perdure.episodes.trajectory_segments import untrained
from perdure.types import Frozen, Purpose, Segment, Turn


class TrajectoryCounts(Frozen):
    """Numbers of tokens that were sampled, trained, and not trained, with the reasons.

    Example:
        TrajectoryCounts(sampled_tokens=410, trained_tokens=398, untrained_tokens={"side": 12},
                         segments={"final": 1, "subagent": 2}, chains=3, training_tokens=49_374, ...)
    """

    sampled_tokens: int = 0
    trained_tokens: int = 0
    untrained_tokens: dict[str, int] = Field(default_factory=dict)
    """By reason: `side`, `stray`, `hosted`, `unused`, `too_stale`, `drift`. `trained_tokens` has the
    rest."""
    untrained_turns: dict[str, int] = Field(default_factory=dict)
    segments: dict[str, int] = Field(default_factory=dict)
    """Number of segments of each kind."""
    chains: int = 0
    compactions: int = 0
    training_tokens: int = 0
    """Tokens that a trainer reads: prompts and responses of all segments."""
    duplication: float = 1.0
    """`training_tokens` divided by the number of tokens when each shared prefix counts once."""
    replayed_turns: int = 0
    """Turns answered from an earlier attempt's recording."""
    replayed_tokens: int = 0
    replay_ended_at: int | None = None
    """The first newly sampled turn after replayed ones; None if there is none."""


def count_trajectory(turns: Sequence[Turn], segments: Sequence[Segment]) -> TrajectoryCounts:
    """`segments` must be cut from `turns`."""
    left = untrained(turns, segments)
    tokens: Counter[str] = Counter()
    for one in left:
        tokens[one.reason] += one.tokens
    replayed = [turn for turn in turns if turn.replayed_from]
    whole = [segment.prompt_ids + segment.response_ids for segment in segments]
    training = sum(map(len, whole))
    return TrajectoryCounts(
        sampled_tokens=sum(turn.sampled_tokens for turn in turns),
        trained_tokens=sum(sum(segment.loss_mask) for segment in segments),
        untrained_tokens=dict(sorted(tokens.items())),
        untrained_turns=count(one.reason for one in left),
        segments=count(segment.kind.value for segment in segments),
        chains=len({turn.chain for turn in turns if turn.purpose is not Purpose.STRAY}),
        compactions=sum(turn.purpose is Purpose.COMPACTION for turn in turns),
        training_tokens=training,
        duplication=round(training / _distinct(whole), 4) if training else 1.0,
        replayed_turns=len(replayed),
        replayed_tokens=sum(len(turn.completion_ids) for turn in replayed),
        replay_ended_at=_first_fresh(turns, replayed),
    )


def _first_fresh(turns: Sequence[Turn], replayed: Sequence[Turn]) -> int | None:
    if not replayed:
        return None
    fresh = (t.index for t in turns if t.index > replayed[-1].index and not t.replayed_from)
    return next(fresh, None)


def _distinct(sequences: Iterable[tuple[int, ...]]) -> int:
    """Number of tokens if a prefix that several sequences share counts once."""
    ordered = sorted(sequences)
    shared = sum(_common(one, other) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def count(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, in order of the values."""
    return dict(sorted(Counter(values).items()))
