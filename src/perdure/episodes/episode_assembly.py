"""Makes both forms of an episode from the results that the stages stored.

It works on bytes only, to run in a thread: 200 turns of 100k tokens take a second and 250 MB.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from perdure.episodes import trajectory_segments
from perdure.episodes.episode import (
    AttemptSummary,
    Episode,
    EpisodeParts,
    ModelUsage,
    build_episode,
    build_episode_from_earlier,
    usage_by_model,
    usage_of,
)
from perdure.types import Segment, Turn

Calls = Mapping[int, ModelUsage]
"""Index of a turn -> the call, for calls that the attempt paid for."""


class AssembledEpisode(NamedTuple):
    """An episode, and the content of its `episode.parquet`."""

    episode: Episode
    tokens: bytes


def assemble(
    parts: EpisodeParts, turns: bytes | None, discarded: Mapping[int, Calls] = MappingProxyType({})
) -> AssembledEpisode:
    """`parts`: without turns; `turns`: the content of `turns.parquet`, None if there is no such file.
    `discarded`: the calls of attempts that no longer count, by the attempt's number.

    Raises: ValueError when `turns` is not a turns file, or grade and status contradict each other.
    """
    from perdure.episodes.turns_parquet import decode

    recorded = decode(turns) if turns is not None else []
    parts = replace(parts, turns=recorded, turns_key=parts.turns_key if recorded else None)
    parts = replace(parts, attempts=_bought(parts, recorded, discarded))
    cut = trajectory_segments.cut(recorded)
    episode = build_episode(parts, cut)
    digest = _sha256(turns) if turns is not None and recorded else ""
    return _with_tokens(episode.model_copy(update={"turns_sha256": digest}), cut)


def calls_of(turns: bytes) -> Calls:
    """The calls in the content of a `turns.parquet`. A replayed turn is no call, because an earlier
    attempt paid for it. Raises: ValueError when `turns` is not a turns file.
    """
    from perdure.episodes.turns_parquet import decode

    return {turn.index: usage_of(turn) for turn in decode(turns) if not turn.replayed_from}


def _bought(
    parts: EpisodeParts, last: Sequence[Turn], discarded: Mapping[int, Calls]
) -> list[AttemptSummary]:
    """The attempts, each discarded one with its cost. A call that the last attempt replayed counts
    only in the last attempt."""
    # A session's name ends with the number of its attempt.
    replayed = {turn.replayed_from.rpartition("-")[2] for turn in last if turn.replayed_from}
    found = {}
    for number, calls in discarded.items():
        bought = [one for index, one in calls.items() if f"{number}/{index}" not in replayed]
        found[number] = usage_by_model(bought)
    return [one.model_copy(update={"bought": found.get(one.attempt, ())}) for one in parts.attempts]


def assemble_from_earlier(parts: EpisodeParts, earlier: Episode, tokens: bytes) -> AssembledEpisode:
    """Assemble an episode whose turns are lost. `tokens`: the content of the earlier
    `episode.parquet`.

    Raises: ValueError when `tokens` cannot be read.
    """
    from perdure.episodes.episode_parquet import decode_segments

    kept = decode_segments(tokens, earlier.tokens_key)
    return _with_tokens(build_episode_from_earlier(replace(parts, turns_key=None), earlier), kept)


def _with_tokens(episode: Episode, cut: Sequence[Segment]) -> AssembledEpisode:
    from perdure.episodes.episode_parquet import encode_segments

    tokens = encode_segments(episode, cut)
    return AssembledEpisode(episode.model_copy(update={"tokens_sha256": _sha256(tokens)}), tokens)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
